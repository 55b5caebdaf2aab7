"""Hidden states at rest: the store, its extraction, verification, statistics and other tools' layouts."""

from dflash_lib.hidden_states.extraction import open_plan, plan_extraction, start_extraction
from dflash_lib.hidden_states.plan import ExtractionOptions
from dflash_lib.hidden_states.schema import StoreError
from dflash_lib.hidden_states.store import HiddenStateStore, StoredSample
from dflash_lib.hidden_states.verify import StoreCheck, require_verified, verify_store

__all__ = ["ExtractionOptions", "HiddenStateStore", "StoreCheck", "StoreError", "StoredSample", "open_plan",
           "plan_extraction", "require_verified", "start_extraction", "verify_store"]
