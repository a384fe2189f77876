from __future__ import annotations

import torch
from torch import nn

from quantpolicy.inventory.forward import AttentionCalls, ForwardWork, PointwiseWork
from quantpolicy.inventory.live import inventory_from_config
from quantpolicy.inventory.shipped import load_inventory
from quantpolicy.measure.probe import probe_forward
from quantpolicy.measure.tiny import denoiser_of
from quantpolicy.rules import load_rules

ROWS, WIDTH, TEXT = 64, 32, 8


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.to_q = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.RMSNorm(WIDTH)

    def forward(self, image: torch.Tensor, text: torch.Tensor) -> torch.Tensor:
        query = self.to_q(self.norm(image)).unflatten(-1, (4, 8)).transpose(1, 2)
        text = text + 1
        key = text.unflatten(-1, (4, 8)).transpose(1, 2)
        mask = torch.ones(ROWS, TEXT, dtype=torch.bool, device="meta")
        out = nn.functional.scaled_dot_product_attention(query, key, key, attn_mask=mask)
        return image + out.transpose(1, 2).flatten(2)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))

    def forward(self, image: torch.Tensor, text: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            image = block(image, text)
        return torch.cat([image, text], dim=1)


def test_a_forward_is_recorded_by_block() -> None:
    model = Model().to("meta", torch.bfloat16)
    inputs = {
        "image": torch.empty(1, ROWS, WIDTH, dtype=torch.bfloat16, device="meta"),
        "text": torch.empty(1, TEXT, WIDTH, dtype=torch.bfloat16, device="meta"),
    }
    rows, work = probe_forward(model, "Model", inputs, ROWS)
    image, text = 2 * ROWS * WIDTH, 2 * TEXT * WIDTH
    assert rows == {f"blocks.{index}.to_q": ROWS for index in range(3)}
    assert work.attention == (
        AttentionCalls(
            name="blocks.*", calls=3, heads=4, query_rows=ROWS, key_rows=TEXT, head_size=8,
            masked=True,
        ),
    )  # fmt: skip
    # A norm reads and writes the image, the sum reads both and writes one; the text is read and
    # written. The mask (64 x 8 bytes) is written, and so are the attention's results where they
    # are not contiguous.
    assert work.pointwise == (
        PointwiseWork(
            name="blocks.*",
            launches=3 * 5,
            image_bytes=3 * (2 * image + 2 * image + 3 * image + ROWS * TEXT),
            other_bytes=3 * 2 * text,
        ),
        PointwiseWork(
            name="", launches=1, image_bytes=2 * (image + text), other_bytes=0
        ),
    )  # fmt: skip


def work_of(blocks: int, heads: int, size: int) -> ForwardWork:
    return ForwardWork(
        attention=(
            AttentionCalls(
                name="blocks.*.attn", calls=blocks, heads=heads, query_rows=9, key_rows=9,
                head_size=64, masked=False,
            ),
        ),
        pointwise=(
            PointwiseWork(name="", launches=7, image_bytes=70, other_bytes=7),
            PointwiseWork(
                name="blocks.*", launches=10 * blocks, image_bytes=size, other_bytes=size
            ),
        ),
    )  # fmt: skip


def test_work_is_fitted_to_other_numbers_and_widths_of_blocks() -> None:
    from quantpolicy.inventory.forward import extents

    own = extents([(f"blocks.{index}.attn.to_q", 100) for index in range(4)])
    deeper = extents([(f"blocks.{index}.attn.to_q", 100) for index in range(12)])
    wider = extents([(f"blocks.{index}.attn.to_q", 150) for index in range(4)])
    other = extents([("layers.0.attn.to_q", 100)])
    work = work_of(4, 8, 4000)
    assert work.fitted(own, own) == work
    assert work.fitted(own, deeper) == work_of(12, 8, 12000)
    assert work.fitted(own, wider) == work_of(4, 12, 6000)
    assert work.fitted(own, other) == ForwardWork(pointwise=work.pointwise[:1])


def test_a_model_cut_to_fewer_blocks_takes_its_share_of_the_shipped_work() -> None:
    part = denoiser_of(load_rules().families["hunyuanvideo"])
    config = {**part.config, "num_layers": 4, "num_single_layers": 8}
    shipped = load_inventory("hunyuanvideo")
    cut = inventory_from_config(part.class_name, config).with_rows_of(shipped)
    assert {call.name: call.calls for call in cut.forward.attention} == {
        "context_embedder.token_refiner.refiner_blocks.*.attn": 2,
        "transformer_blocks.*.attn": 4,
        "single_transformer_blocks.*.attn": 8,
    }
    whole = {work.name: work for work in shipped.forward.pointwise}
    for work in cut.forward.pointwise:
        blocks = 1 / 5 if "transformer_blocks" in work.name else 1
        assert work.launches == whole[work.name].launches * blocks
        assert work.image_bytes == round(whole[work.name].image_bytes * blocks)
    full = inventory_from_config(part.class_name, part.config).with_rows_of(shipped)
    assert full.forward == shipped.forward


def test_every_shipped_denoiser_knows_its_forward_and_no_text_encoder_does() -> None:
    for spec in load_rules().families.values():
        for part in spec.components.values():
            if part.inventory:
                known = load_inventory(part.inventory).forward
                assert (known is not None) == (part.kind == "denoiser"), part.inventory
                assert known is None or (known.attention and known.pointwise)
