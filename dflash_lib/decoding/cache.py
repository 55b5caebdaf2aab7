"""The target's KV cache while decoding: made for its configuration, passed under the right name, rolled back.

Only targets whose layers all keep ordinary keys and values can be rolled back here: a recurrent state cannot be
cropped, and a sliding window has dropped what a rollback would need.
"""

import inspect

from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

from dflash_lib.target.loading import Target


class DecodingError(ValueError):
    """A request that cannot be decoded; the message says why and what to do."""


def cache_argument(model) -> str:
    """The name under which the model's forward takes its cache: `cache` (Transformers 5.24) or `past_key_values`."""
    parameters = inspect.signature(model.forward).parameters
    for name in ("cache", "past_key_values"):
        if name in parameters:
            return name
    raise DecodingError(f"{type(model).__name__}.forward takes neither `cache` nor `past_key_values`, so tokens cannot "
                        "be decoded one after another with it")


def new_cache(target: Target) -> DynamicCache:
    """An empty cache for one sequence.

    Raises DecodingError for a target with other than full-attention layers (Gated DeltaNet, sliding window).
    """
    cache = DynamicCache(config=target.config)
    others = sorted({type(layer).__name__ for layer in cache.layers if type(layer) is not DynamicLayer})
    if others:
        kinds = sorted({*(getattr(target.config, "layer_types", None) or [])} - {"full_attention"})
        raise DecodingError(f"{target.path.name}: speculative decoding needs a cache that can be rolled back, and this "
                            f"target's has {', '.join(others)} ({', '.join(kinds) or 'sliding window'}). "
                            "Only targets with full attention in every layer are decoded so far.")
    return cache


def crop_cache(cache: DynamicCache, num_tokens: int) -> None:
    """Forgets the newest tokens, so that `num_tokens` are left. Raises DecodingError when there are fewer."""
    surplus = cache.get_seq_length() - num_tokens
    if surplus < 0:
        raise DecodingError(f"a cache of {cache.get_seq_length()} tokens cannot be cropped to {num_tokens}")
    if surplus:
        cache.crop(-surplus)  # the negative form means the same in every Transformers release
