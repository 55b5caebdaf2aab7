"""Stored hidden states in every tool's layout: this project's store, speculators, SpecForge, Model-Optimizer."""
