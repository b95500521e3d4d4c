"""The gradient of the cross-entropy at a place is what it does when something is added there."""

import pytest
import torch
from torch.nn import functional as F

from ingest.dictionaries import At
from ingest.models import open_model
from ingest.models.capture import capture, logits_with, loss_gradients
from tests.ingest.tiny_models import tiny_model

torch.set_num_threads(1)
TOKENS = torch.tensor([[(5 + 17 * at + 7 * row) % 61 for at in range(9)] for row in range(3)])
PREDICTED = torch.ones(3, 8, dtype=torch.bool)
PREDICTED[:, 0] = False
PREDICTED[1, 5:] = False
POINTS = [(0, "embed", At.STREAM), (1, "attn.z", At.MODULE), (1, "resid_mid", At.STREAM)] + [
    (layer, site, at) for layer, site in ((0, "mlp"), (1, "attn"), (2, "mlp")) for at in At
]


def nats(logits):
    return float(
        F.cross_entropy(logits[:, :-1][PREDICTED].double(), TOKENS[:, 1:][PREDICTED], reduction="sum")
    )


@pytest.mark.parametrize("name", ["gpt2", "llama", "gemma2", "granite", "cohere"])
def test_gradients_are_finite_differences(tmp_path, name):
    tiny_model(name).save_pretrained(tmp_path)
    model = open_model(tmp_path, check=False)
    seen = capture(model, TOKENS, outputs=POINTS, logits=True)
    before = {name: p.requires_grad for name, p in model.bridge.named_parameters()}
    gradients = loss_gradients(model, TOKENS, POINTS, PREDICTED)
    assert set(gradients) == set(POINTS)
    assert {name: p.requires_grad for name, p in model.bridge.named_parameters()} == before
    assert all(p.grad is None for p in model.bridge.parameters())
    make = torch.Generator().manual_seed(0)
    for point, gradient in gradients.items():
        value = seen.outputs[point]
        assert gradient.shape == value.shape and not gradient.requires_grad
        along = torch.randn(value.shape, generator=make) * value.std() * 0.001
        along = along + gradient * (0.5 * float(along.norm() / gradient.norm()))  # a slope worth measuring
        moved = [
            nats(logits_with(model, TOKENS, {point: lambda own, _, add=sign * along: own + add}))
            for sign in (-1.0, 1.0)
        ]
        assert float((gradient * along).sum()) == pytest.approx((moved[1] - moved[0]) / 2, rel=0.02), point
    # The last prediction that counts in row 1 is position 4's: what stands behind it is felt nowhere.
    last = gradients[2, "mlp", At.STREAM]
    assert not last[1, 5:].any() and last[1, 4].any() and not last[:, 8].any()
