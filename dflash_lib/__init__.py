"""A workbench that trains DFlash drafters from cached hidden states of a frozen target."""

import warnings

# tqdm asks for ipywidgets when it is imported in a notebook; the workbench has its own progress line (progress.py).
warnings.filterwarnings("ignore", message="IProgress not found")
