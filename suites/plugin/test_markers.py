"""The markers: what they take, what is refused, and what they put aside."""

from __future__ import annotations

import sys
import types

import pytest

from pytest_bcg.gpus import parse_size


def test_the_markers_are_registered(pytester: pytest.Pytester) -> None:
    result = pytester.runpytest("--markers")
    result.stdout.fnmatch_lines_random(
        [
            "@pytest.mark.bcg: *",
            "@pytest.mark.standalone: *",
            "@pytest.mark.gpu(count=1, memory=None): *",
            "@pytest.mark.est_time(seconds): *",
            "@pytest.mark.nightly: *",
        ]
    )


def test_right_markers_are_taken(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        """
        import pytest
        @pytest.mark.bcg
        @pytest.mark.standalone
        @pytest.mark.est_time(2.5)
        def test_one(): pass
        @pytest.mark.est_time(seconds=3)
        def test_two(): pass
        @pytest.mark.gpu(1, "20GiB")
        @pytest.mark.gpu(memory=None)
        @pytest.mark.gpu(count=2, memory="512 MB")
        @pytest.mark.skip
        def test_three(): pass
        """
    )
    pytester.runpytest("--strict-markers").assert_outcomes(passed=2, skipped=1)


MISUSED = {
    "gpu(cout=1)": "gpu got an unknown argument 'cout'; it takes count (a whole number from 1), "
    "memory (a size such as '20GiB')",
    "gpu(count='two')": "gpu got count='two'; it takes count (a whole number*",
    "gpu(count=0)": "gpu got count=0; it takes count*",
    "gpu(count=True)": "gpu got count=True; it takes count*",
    "gpu(memory=20)": "gpu got memory=20; it takes *memory (a size such as '20GiB')",
    "gpu(memory='much')": "gpu got memory='much'; it takes*",
    "gpu(1, count=1)": "gpu got 'count' twice; it takes*",
    "gpu(1, '1GiB', 3)": "gpu got 3 arguments by position; it takes*",
    "est_time()": "est_time needs 'seconds'; it takes seconds (a number of seconds above 0)",
    "est_time(0)": "est_time got seconds=0; it takes*",
    "est_time('long')": "est_time got seconds='long'; it takes*",
    "est_time(minutes=1)": "est_time got an unknown argument 'minutes'; it takes seconds*",
    "bcg(whole=True)": "bcg got an unknown argument 'whole'; it takes no arguments",
    "standalone('file')": "standalone got 1 arguments by position; it takes no arguments",
    "nightly(1)": "nightly got 1 arguments by position; it takes no arguments",
}


@pytest.mark.parametrize(("marker", "message"), MISUSED.items(), ids=MISUSED.keys())
def test_a_misused_marker_is_a_usage_fault(
    pytester: pytest.Pytester, marker: str, message: str
) -> None:
    # A marker cannot be called with a plain function and nothing else: it would mark it.
    pytester.makepyfile(
        test_it=f"import pytest\ndef test_before(): pass\n@pytest.mark.{marker}\n"
        "def test_it(): pass"
    )
    result = pytester.runpytest()
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines([f"ERROR: test_it.py:3: test_it.py::test_it: marker {message}"])
    result.stdout.no_fnmatch_line("*passed*")


def test_a_misused_marker_in_a_standalone_file_is_a_usage_fault_too(
    pytester: pytest.Pytester,
) -> None:
    pytester.makepyfile(
        test_it="import pytest\npytestmark = pytest.mark.standalone\n"
        "@pytest.mark.gpu(count='x')\ndef test_it(): pass"
    )
    result = pytester.runpytest()
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(["ERROR: test_it.py:3: test_it.py::test_it: marker gpu got*"])


@pytest.mark.parametrize("arguments", [["-m", "nightly"], ["--bcg-nightly"]])
def test_a_nightly_test_may_be_standalone(pytester: pytest.Pytester, arguments: list[str]) -> None:
    pytester.makepyfile(
        "import pytest\n@pytest.mark.nightly\n@pytest.mark.standalone\ndef test_it(): pass"
    )
    pytester.runpytest(*arguments).assert_outcomes(passed=1)


def test_every_misused_marker_is_listed(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        test_it="""
            import pytest
            @pytest.mark.gpu(x=1)
            def test_one(): pass
            @pytest.mark.est_time()
            def test_two(): pass
        """
    )
    result = pytester.runpytest()
    result.stderr.fnmatch_lines(["*::test_one: marker gpu*", "*::test_two: marker est_time*"])


@pytest.mark.parametrize(
    ("arguments", "ran", "deselected"),
    [
        ([], ["test_daily"], 1),
        (["--bcg-nightly"], ["test_daily", "test_nightly"], 0),
        (["-m", "nightly"], ["test_nightly"], 1),
        (["-m", "not nightly"], ["test_daily"], 1),
    ],
    ids=["by default", "option", "-m nightly", "-m not nightly"],
)
def test_nightly_tests_run_only_when_asked_for(
    pytester: pytest.Pytester, arguments: list[str], ran: list[str], deselected: int
) -> None:
    pytester.makepyfile(
        "import pytest\ndef test_daily(): pass\n@pytest.mark.nightly\ndef test_nightly(): pass"
    )
    result = pytester.runpytest("-v", *arguments)
    result.assert_outcomes(passed=len(ran), deselected=deselected)
    result.stdout.fnmatch_lines([f"*::{name} PASSED*" for name in ran])


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("20GiB", 20 * 1024**3),
        ("20GB", 20 * 1000**3),
        ("1.5 MiB", 3 * 512 * 1024),
        ("512kb", 512_000),
        ("7B", 7),
        ("2TiB", 2 * 1024**4),
    ],
)
def test_sizes(text: str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "20", "GiB", "-1GiB", "1PiBB", "1,5GiB", "9" * 400 + "GB"])
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is not a size"):
        parse_size(text)


# A stand-in for torch: the machine's GPUs are what the test says.
FAKE_TORCH = """
import types
sizes = {sizes}
cuda = types.SimpleNamespace(
    device_count=lambda: len(sizes),
    get_device_properties=lambda index: types.SimpleNamespace(total_memory=sizes[index]),
)
"""


@pytest.mark.parametrize(
    ("gib", "marker", "reason"),
    [
        ([], "gpu", "needs 1 GPU(s), this machine has none"),
        ([80], "gpu(count=2)", "needs 2 GPU(s), this machine has 1"),
        ([80], "gpu", None),
        ([80], "gpu(memory='79GiB')", None),
        ([80], "gpu(memory='81GiB')", "needs 1 GPU(s) with 81.0 GiB; here: 80.0 GiB"),
        (
            [80, 16],
            "gpu(count=2, memory='20GiB')",
            "needs 2 GPU(s) with 20.0 GiB; here: 80.0 GiB, 16.0 GiB",
        ),
        ([80, 80, 16], "gpu(count=2, memory='20GiB')", None),
    ],
)
def test_gpu_tests_run_or_are_skipped_with_the_reason(
    pytester: pytest.Pytester,
    monkeypatch: pytest.MonkeyPatch,
    gib: list[int],
    marker: str,
    reason: str | None,
) -> None:
    torch = types.ModuleType("torch")
    exec(FAKE_TORCH.format(sizes=[size * 1024**3 for size in gib]), torch.__dict__)
    monkeypatch.setitem(sys.modules, "torch", torch)
    pytester.makepyfile(f"import pytest\n@pytest.mark.{marker}\ndef test_it(): pass")
    result = pytester.runpytest("-rs")
    if reason is None:
        result.assert_outcomes(passed=1)
    else:
        result.assert_outcomes(skipped=1)
        result.stdout.fnmatch_lines([f"SKIPPED ?1? *: {reason}"])


def test_a_standalone_gpu_test_reads_the_memory_in_its_own_process(
    pytester: pytest.Pytester,
) -> None:
    pytester.makepyfile(
        torch=FAKE_TORCH.format(sizes=[16 * 1024**3]) + "import os; print('torch in', os.getpid())",
        test_it="""
            import os
            import pytest
            pytestmark = [pytest.mark.standalone, pytest.mark.gpu(memory="20GiB")]
            def test_it(): pass
        """,
    )
    result = pytester.runpytest_subprocess("-rs", "-o", "pythonpath=.")
    result.assert_outcomes(skipped=1)
    result.stdout.fnmatch_lines(["SKIPPED ?1? *: needs 1 GPU(s) with 20.0 GiB; here: 16.0 GiB"])


def test_torch_is_imported_for_selected_gpu_tests_alone(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        torch="raise AssertionError('imported')",
        test_it="import pytest\ndef test_plain(): pass\n@pytest.mark.gpu\ndef test_gpu(): pass",
    )
    arguments = ("-p", "no:cacheprovider", "-o", "pythonpath=.")
    pytester.runpytest_subprocess(*arguments, "-m", "not gpu").assert_outcomes(
        passed=1, deselected=1
    )
    assert pytester.runpytest_subprocess(*arguments).ret == pytest.ExitCode.INTERNAL_ERROR


def test_without_torch_gpu_tests_are_skipped(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        torch="raise ImportError('no such wheel')",
        test_it="import pytest\n@pytest.mark.gpu\ndef test_gpu(): pass",
    )
    result = pytester.runpytest_subprocess("-rs", "-o", "pythonpath=.")
    result.assert_outcomes(skipped=1)
    result.stdout.fnmatch_lines(["*torch cannot be imported: no such wheel"])


def test_importing_the_plugin_imports_neither_torch_nor_the_engine(
    pytester: pytest.Pytester,
) -> None:
    result = pytester.runpython_c(
        "import sys, pytest_bcg.plugin\n"
        "print(sorted({'torch', 'bcg_core', 'yaml', 'typer'} & set(sys.modules)))"
    )
    result.stdout.fnmatch_lines(["[[]]"])
