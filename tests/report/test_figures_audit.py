"""figures_audit: what is drawn is what was found, rows that are zero or infinite included."""

import numpy as np

from dflash_lib.hidden_states.audit import audit_states
from dflash_lib.report.figures_audit import CEILING, audit_figure
from tests.hidden_states.audit.faults import PLANTS
from tests.hidden_states.audit.gallery import make_case


def test_each_slot_against_every_layer_and_every_row(tiny_llama):
    planted = PLANTS["not_finite"](make_case(tiny_llama, "not_finite", 0, "bf16"))
    audit = audit_states(planted.source, tiny_llama)
    figure = audit_figure(audit)
    matrix, tokens, _ = figure.axes
    drawn = matrix.images[0].get_array()
    assert drawn.shape == (4, 7) and np.allclose(drawn, np.clip(audit.layers, 1e-4, CEILING))
    assert [text.get_text() for text in matrix.get_yticklabels()] == [f"{s.slot}: {s.stated}" for s in audit.slots]
    (nearest,) = matrix.collections
    assert [f"layer {int(x)}" for x, _ in nearest.get_offsets()] == [s.holds for s in audit.slots]
    slot = next(iter(planted.slots))
    line = next(line for line in tokens.lines if line.get_label() == f"slot {slot}")
    assert len(line.get_ydata()) == sum(len(s.input_ids) for s in planted.source.samples)
    assert np.isfinite(line.get_ydata()).all() and max(line.get_ydata()) == CEILING
    assert "relative distance" in tokens.get_ylabel() and "position" in tokens.get_xlabel()
