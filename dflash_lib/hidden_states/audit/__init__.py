"""Whether stored states are what they are said to be, found out by recomputing some of them with the target."""

from dflash_lib.hidden_states.audit.auditing import audit_states
from dflash_lib.hidden_states.audit.captured import CapturedStates
from dflash_lib.hidden_states.audit.faults import Finding
from dflash_lib.hidden_states.audit.result import Audit, SlotResult

__all__ = ["Audit", "CapturedStates", "Finding", "SlotResult", "audit_states"]
