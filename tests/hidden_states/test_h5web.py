"""jupyterlab-h5web: what its server sends of a shard are the stored numbers, in the form that its page reads.

The page of the pinned release asks for 16-bit floats with dtype=safe and reads float32. Release 12.9 reads float16 in
browsers that have it, and the server sends float32 all the same: what is shown then is wrong (seen in Chromium).
"""

from importlib.metadata import version

import h5grove
import numpy as np
import pytest
from h5grove.content import create_content

from dflash_lib.hidden_states.schema import AUX, LAST
from dflash_lib.hidden_states.store import HiddenStateStore
from tests.hidden_states.rows import make_prepared, make_store


@pytest.mark.parametrize("encoding", ["bf16", "bf16+zstd"])
def test_its_server_sends_the_stored_numbers(tiny_llama, tmp_path, encoding):
    make_store(tmp_path / "store", tiny_llama, make_prepared(tiny_llama), encoding=encoding)
    store = HiddenStateStore.open(tmp_path / "store")
    sample = store.read(int(store.shards[0].sample_index[0]))
    for name, states in ((AUX, sample.aux_hidden_states), (LAST, sample.last_hidden_state_prenorm)):
        content = create_content(store.file(0), f"/{name}")
        sent = content.data(f"0:{len(states)}", dtype="safe")
        encoded = h5grove.encoders.encode(sent, "bin").content
        assert np.array_equal(np.frombuffer(encoded, "<f4").reshape(states.shape), states.float().numpy())
        assert content.metadata()["type"]["size"] == 2, "which a page may take for float16"
    ids = create_content(store.file(0), "/input_ids").data(f"0:{len(sample.input_ids)}")
    assert np.array_equal(ids, sample.input_ids)


def test_its_page_is_of_a_release_that_reads_them_so():
    assert version("jupyterlab-h5web") == "12.8.0", "another release: look at a shard in JupyterLab first"
