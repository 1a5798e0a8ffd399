"""Linear layers whose bits depend on the number of rows are found and computed in blocks; what passed is noted."""

from pathlib import Path

import pytest
import torch

from headrace.kernels import linear_check
from headrace.kernels.linear import BLOCK_ROWS, PackedLinear
from headrace.kernels.linear_check import check_linears, is_invariant


class Moody(PackedLinear):
    """Adds a hair to results for some numbers of rows."""

    moods = frozenset({17})

    def _multiply(self, x: torch.Tensor) -> torch.Tensor:
        return super()._multiply(x) + (1e-3 if x.shape[0] in self.moods else 0.0)


@pytest.fixture
def layers() -> list[PackedLinear]:
    return [
        kind(torch.randn(shape)) for kind, shape in ((PackedLinear, (32, 16)), (Moody, (48, 16)), (Moody, (48, 16)))
    ]


def test_a_layer_that_fails_is_computed_in_blocks_and_then_passes(layers: list[PackedLinear], tmp_path: Path) -> None:
    assert [is_invariant(layer) for layer in layers] == [True, False, False]
    assert check_linears(layers, tmp_path) == 2
    assert [layer.in_blocks for layer in layers] == [False, True, True]
    assert all(is_invariant(layer) for layer in layers)
    x = torch.randn(2 * BLOCK_ROWS + 9, 16)
    assert layers[1](x).shape == (2 * BLOCK_ROWS + 9, 48)
    assert torch.equal(layers[1](x[70:75]), layers[1](x)[70:75])


def test_the_outcome_is_noted_and_read_at_the_next_start(
    layers: list[PackedLinear], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_linears(layers, tmp_path)
    again = [Moody(torch.randn(48, 16)), PackedLinear(torch.randn(32, 16))]
    calls: list[PackedLinear] = []

    def is_invariant(layer: PackedLinear) -> bool:
        calls.append(layer)
        return True

    monkeypatch.setattr(linear_check, "is_invariant", is_invariant)
    assert check_linears(again, tmp_path) == 1
    assert [layer.in_blocks for layer in again] == [True, False]
    assert calls == [again[0]]  # in blocks


@pytest.mark.parametrize("damage", ["", "{", "[]", '{"failing": 3}'])
def test_a_damaged_note_is_made_anew(layers: list[PackedLinear], tmp_path: Path, damage: str) -> None:
    check_linears(layers, tmp_path)
    (note,) = tmp_path.iterdir()
    whole = note.read_text()
    note.write_text(damage)
    assert check_linears([layers[0], Moody(torch.randn(48, 16))], tmp_path) == 1
    assert note.read_text() == whole


def test_a_layer_that_fails_in_blocks_too_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    class Hopeless(Moody):
        calls = 0

        def _multiply(self, x: torch.Tensor) -> torch.Tensor:
            self.calls += 1
            return PackedLinear._multiply(self, x) + self.calls

    assert check_linears([Hopeless(torch.randn(8, 8))], tmp_path) == 1
    assert "depend on the batch" in capsys.readouterr().out


def test_a_cache_that_cannot_be_written_is_no_obstacle(layers: list[PackedLinear], tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert check_linears(layers, tmp_path / "file" / "folder") == 2
