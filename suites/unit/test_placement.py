"""Breaks placed by pattern: what is matched, that it breaks, and that nothing is left behind."""

from __future__ import annotations

import sys
import threading
import types
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

from bcg_core import GraphRunner, enable
from bcg_core.breaks import active_capture, capturing
from bcg_core.errors import UnsupportedError
from bcg_core.placement import PlacedBreak, placed, sites

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from pytest_bcg.fixtures import Capture

pytestmark = pytest.mark.bcg


class Attention(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.project = nn.Linear(width, width)

    def forward(self, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        return self.project(x) * scale


class Layer(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.attention = Attention(width)
        self.mlp = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.mlp(torch.relu(self.attention(x, scale=0.5)))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Layer(4) for _ in range(3)])
        self.head = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


class Recorded:
    """A capture that runs its breaks at once and notes what ran, with which arguments."""

    def __init__(self) -> None:
        self.ran: list[Any] = []

    def run_break(
        self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        assert active_capture() is self
        self.ran.append(function)
        with capturing(None):
            return function(*args, **kwargs)


def net(device: torch.device | None = None) -> Net:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return Net().eval().requires_grad_(False).to(device)


def breaks(module: nn.Module, *patterns: str | PlacedBreak) -> int:
    """How many breaks a capture of ``module`` meets."""
    capture = Recorded()
    with placed(module, patterns), capturing(capture):
        module(torch.ones(2, 4))
    return len(capture.ran)


def dictionaries(module: nn.Module) -> list[dict[str, Any]]:
    return [dict(vars(part)) for part in module.modules()]


# Patterns


@pytest.mark.parametrize(
    ("pattern", "names"),
    [
        ("layers.*.attention", [f"layers.{i}.attention" for i in range(3)]),
        ("layers.1.*", ["layers.1.attention", "layers.1.attention.project", "layers.1.mlp"]),
        ("layers.[02].mlp", ["layers.0.mlp", "layers.2.mlp"]),
        ("Layer", [f"layers.{i}" for i in range(3)]),
        ("head", ["head"]),
    ],
)
def test_a_pattern_is_a_path_a_glob_or_a_class_name(pattern: str, names: list[str]):
    with placed(net(), [pattern]) as placement:
        assert placement == names


def test_a_submodule_at_two_paths_is_broken_once_and_found_by_either():
    module = net()
    module.layers[2] = module.layers[0]
    assert len(sites(module, "Layer")) == 2
    assert len(sites(module, "layers.0")) == len(sites(module, "layers.2")) == 1
    assert breaks(module, "layers.2") == 2


def test_a_break_within_a_break_is_a_plain_call():
    assert breaks(net(), "layers.*") == 3
    assert breaks(net(), "Linear") == 7
    assert breaks(net(), "layers.0", "Linear") == 1 + 5


def test_patterns_that_overlap_break_once():
    assert breaks(net(), "Attention", "layers.*.attention") == 3


@pytest.mark.parametrize(
    ("pattern", "message"),
    [
        ("layers.*.attentoin", r"'layers\.\*\.attentoin' matches no submodule of Net"),
        ("layer.0.attention", r"did you mean layers\.0\.attention"),
        ("Attenton", "did you mean Attention"),
        ("", "'' matches no submodule of Net"),
        ("torch.nn.functional:scaled_dot_attention", "did you mean scaled_dot_product_attention"),
        ("torch.nn.functionl:relu", r"'torch\.nn\.functionl' cannot be imported"),
        (":relu", "'' cannot be imported"),
        ("torch.nn:Linear", "names a class, not a function"),
        ("torch.nn:Linear.forwards", "did you mean forward"),
        ("torch.nn:functional.relu", "functional is no class"),
        ("math:pi", "names a float, not a function"),
    ],
)
def test_a_pattern_that_matches_nothing_is_an_error_that_says_what_is_near(
    pattern: str, message: str
):
    with pytest.raises(UnsupportedError, match=message), placed(net(), [pattern]):
        pass
    with pytest.raises(UnsupportedError, match=message):
        GraphRunner(net(), [pattern])


def test_a_plain_function_has_no_submodules_to_match():
    with (
        pytest.raises(UnsupportedError, match="'layers' names submodules"),
        placed(None, ["layers"]),
    ):
        pass


# Functions of Python modules


@pytest.fixture
def library() -> Iterator[types.SimpleNamespace]:
    """An imported package whose function others have imported, one under another name."""

    def function(x: torch.Tensor, factor: float = 2.0) -> torch.Tensor:
        return x * factor

    class Thing:
        @staticmethod
        def static(x: torch.Tensor) -> torch.Tensor:
            return x + 1

        @classmethod
        def of_class(cls, x: torch.Tensor) -> tuple[type, torch.Tensor]:
            return cls, x + 2

        def method(self, x: torch.Tensor) -> torch.Tensor:
            return x + 3

    class Derived(Thing):
        pass

    parts = {
        name: types.ModuleType(f"bcg_library.{name}") for name in ("origin", "user", "renamed")
    }
    parts["origin"].function = function  # type: ignore[attr-defined]
    parts["origin"].Thing = Thing  # type: ignore[attr-defined]
    parts["origin"].Derived = Derived  # type: ignore[attr-defined]
    parts["user"].function = function  # type: ignore[attr-defined]
    parts["renamed"].another = function  # type: ignore[attr-defined]
    other = types.ModuleType("bcg_other")
    other.function = function  # type: ignore[attr-defined]
    other.unrelated = function  # type: ignore[attr-defined]
    modules = {"bcg_library": types.ModuleType("bcg_library"), "bcg_other": other}
    modules.update({module.__name__: module for module in parts.values()})
    sys.modules.update(modules)
    yield types.SimpleNamespace(function=function, other=other, **parts)
    for name in modules:
        del sys.modules[name]


def test_a_function_breaks_where_it_is_defined_and_where_it_was_imported(library: Any):
    capture = Recorded()
    x = torch.ones(2)
    with placed(None, ["bcg_library.origin:function"]), capturing(capture):
        calls = [library.origin.function, library.user.function, library.renamed.another]
        calls.append(library.other.function)
        results = [call(x, factor=3.0) for call in calls]
    assert capture.ran == [library.function] * 4
    assert all(torch.equal(result, x * 3) for result in results)
    for holder, name in (
        (library.origin, "function"),
        (library.user, "function"),
        (library.renamed, "another"),
        (library.other, "function"),
        (library.other, "unrelated"),
    ):
        assert vars(holder)[name] is library.function


@pytest.mark.parametrize("name", ["static", "of_class", "method"])
def test_a_method_of_a_class_breaks_and_stays_what_it_was(library: Any, name: str):
    thing, derived = library.origin.Thing, library.origin.Derived
    before, x = vars(thing)[name], torch.ones(2)
    expected = getattr(derived(), name)(x)
    capture = Recorded()
    with placed(None, [f"bcg_library.origin:Thing.{name}"]), capturing(capture):
        assert type(vars(thing)[name]) is type(before)
        result = getattr(derived(), name)(x)
    assert len(capture.ran) == 1
    assert vars(thing)[name] is before
    if name == "of_class":
        assert result[0] is expected[0] is derived
        expected, result = expected[1], result[1]
    assert torch.equal(result, expected)


def test_an_inherited_method_breaks_on_the_named_class_alone(library: Any):
    thing, derived = library.origin.Thing, library.origin.Derived
    capture = Recorded()
    with placed(None, ["bcg_library.origin:Derived.method"]), capturing(capture):
        thing().method(torch.ones(2))
        assert capture.ran == []
        derived().method(torch.ones(2))
    assert len(capture.ran) == 1
    assert "method" not in vars(derived)


def test_a_replacement_runs_in_the_break_and_nowhere_else(library: Any):
    def replacement(x: torch.Tensor, factor: float = 2.0) -> torch.Tensor:
        return x - 100

    rule = PlacedBreak("bcg_library.origin:function", replacement=replacement)
    x = torch.ones(2)
    capture = Recorded()
    with placed(None, [rule]):
        assert torch.equal(library.user.function(x), x * 2)
        with capturing(capture):
            assert torch.equal(library.user.function(x), x - 100)
            with capturing(None):
                assert torch.equal(library.user.function(x), x * 2)
    assert capture.ran == [replacement]


def test_a_break_is_there_only_when_its_condition_holds(library: Any):
    rule = PlacedBreak("bcg_library.origin:function", when=lambda x, factor=2.0: factor > 2)
    capture = Recorded()
    with placed(None, [rule]), capturing(capture):
        library.origin.function(torch.ones(2))
        assert capture.ran == []
        library.origin.function(torch.ones(2), factor=3.0)
    assert capture.ran == [library.function]


# Nothing is left behind


def test_everything_is_restored_exactly(library: Any):
    module = net()
    own = module.layers[1].attention.forward
    module.layers[1].attention.forward = own
    before = dictionaries(module)
    with placed(module, ["Attention", "layers.*", "bcg_library.origin:function"]):
        assert "forward" in vars(module.layers[0])
        assert library.user.function is not library.function
    assert dictionaries(module) == before
    assert vars(module.layers[1].attention)["forward"] is own
    assert library.user.function is library.function


def test_everything_is_restored_when_the_block_raises():
    module = net()
    before = dictionaries(module)
    with pytest.raises(KeyboardInterrupt), placed(module, ["Layer", "head"]):
        raise KeyboardInterrupt
    assert dictionaries(module) == before


def test_everything_is_restored_when_a_later_pattern_matches_nothing():
    module = net()
    before = dictionaries(module)
    with pytest.raises(UnsupportedError), placed(module, ["Layer", "nothing"]):
        pass
    assert dictionaries(module) == before


def test_placements_nest():
    module = net()
    before = dictionaries(module)
    with placed(module, ["head"]):
        with placed(module, ["head", "Attention"]):
            assert breaks(module, "layers.0") == 1 + 2 + 1
        capture = Recorded()
        with capturing(capture):
            module(torch.ones(2, 4))
        assert len(capture.ran) == 1
    assert dictionaries(module) == before


def test_what_others_put_on_top_meanwhile_is_theirs():
    module = net()
    with placed(module, ["head"]):
        below = module.head.forward
        module.head.forward = lambda x: below(x) + 1
    plain = module(torch.ones(2, 4))
    del module.head.forward
    assert torch.equal(plain, module(torch.ones(2, 4)) + 1)


# Threads


def in_thread(function: Callable[[], Any]) -> Any:
    results: list[Any] = []

    def run() -> None:
        try:
            results.append(function())
        except BaseException as error:
            results.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join(30)
    assert results, "the thread hangs"
    return results[0]


def test_the_capture_of_another_thread_does_not_meet_the_breaks():
    module = net()

    def capture_there() -> list[Any]:
        capture = Recorded()
        with capturing(capture):
            module(torch.ones(2, 4))
        return capture.ran

    with placed(module, ["Attention"]):
        assert in_thread(capture_there) == []


def test_placements_of_two_threads_that_overlap_are_both_taken_off():
    module = net()
    before = dictionaries(module)
    inside, may_leave = threading.Event(), threading.Event()

    def stay() -> int:
        with placed(module, ["Attention"]):
            inside.set()
            assert may_leave.wait(30)
            return breaks(module, "head")

    results: list[Any] = []
    thread = threading.Thread(target=lambda: results.append(stay()))
    with placed(module, ["Attention"]):
        thread.start()
        assert inside.wait(30)
        assert breaks(module, "head") == 3 + 1
    may_leave.set()
    thread.join(30)
    assert results == [3 + 1]
    assert dictionaries(module) == before


@pytest.mark.timeout(60)
def test_threads_that_capture_a_module_and_a_part_of_it_do_not_wait_for_each_other():
    """One holds the part's runner and would place breaks; the other placed them and calls it."""
    module = net()
    x = torch.ones(2, 4)
    part_locked, placed_outside = threading.Event(), threading.Event()
    with torch.no_grad():
        expected = module(x)

    def part_is_told(reason: str) -> None:  # under the part's lock, before its capture
        part_locked.set()
        assert placed_outside.wait(30)

    with enable(module.layers[0], breaks=["mlp"], backend="simulated", on_miss=part_is_told):

        def call_part() -> torch.Tensor:
            with torch.no_grad():
                return module.layers[0](x)

        thread = threading.Thread(target=call_part)
        thread.start()
        assert part_locked.wait(30)
        with placed(module, ["layers.1.mlp"]):
            placed_outside.set()
            with torch.no_grad():
                assert torch.equal(module(x), expected)
        thread.join(30)
        assert not thread.is_alive()


# With the engine


def test_a_placed_break_is_captured_and_replayed(bcg_capture: Capture, bcg_device: torch.device):
    module = net(bcg_device)
    x = torch.randn(2, 4, device=bcg_device)
    module(x)
    with placed(module, ["layers.*.attention"]), torch.no_grad():
        graph, output = bcg_capture(module, x)
    assert graph.breaks == 3
    assert graph.segments == 3  # nothing before the first
    assert all(name.startswith("Attention.forward ") for name in graph.break_names())
    for seed in range(3):
        x.copy_(torch.randn(2, 4, generator=torch.Generator().manual_seed(seed)))
        graph.replay()
        with torch.no_grad():
            assert torch.equal(output, module(x))


def test_a_runner_breaks_at_patterns_and_leaves_the_module_as_it_was(
    bcg_backend: str, bcg_device: torch.device
):
    module = net(bcg_device)
    before = dictionaries(module)
    runner = GraphRunner(module, ["Attention", "torch:relu"], backend=bcg_backend)
    with torch.no_grad():
        for seed in range(3):
            x = torch.randn(2, 4, generator=torch.Generator().manual_seed(seed)).to(bcg_device)
            assert torch.equal(runner(x), module(x))
    assert runner.stats.breaks == 6
    assert runner.stats.replays == 2
    assert dictionaries(module) == before
