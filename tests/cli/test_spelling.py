"""The old option spellings are rewritten, and nothing else is."""

from __future__ import annotations

import pytest

from gpufleet.cli.spelling import normalize


@pytest.mark.parametrize(
    "given",
    [
        ["-n", "4"],
        ["-n4"],
        ["-n=4"],
        ["-nthreads", "4"],
        ["-nthreads=4"],
        ["--nthreads", "4"],
        ["-numthreads", "4"],
        ["-numthreads=4"],
        ["--numthreads=4"],
        ["--threads-per-device", "4"],
        ["--threads-per-device=4"],
    ],
)
def test_every_spelling_of_the_thread_count_becomes_one(given: list[str]) -> None:
    command, *options = normalize(["migrate", *given])

    assert command == "migrate"
    assert "=".join(options) == "--threads-per-device=4"


@pytest.mark.parametrize("dashes", ["-", "--"])
@pytest.mark.parametrize("word", ["qatest", "noprompt"])
def test_the_samples_flags_get_two_dashes(dashes: str, word: str) -> None:
    assert normalize(["migrate", dashes + word]) == ["migrate", f"--{word}"]


def test_values_that_are_no_numbers_reach_the_parser() -> None:
    assert normalize(["migrate", "-n=x"]) == ["migrate", "--threads-per-device=x"]
    assert normalize(["migrate", "-n-3"]) == ["migrate", "--threads-per-device=-3"]
    assert normalize(["migrate", "-n="]) == ["migrate", "--threads-per-device="]


def test_other_options_stay_as_they_are() -> None:
    others = ["--launch", "packed", "--image", "n4", "--json", "-x", "n"]

    assert normalize(["migrate", *others]) == ["migrate", *others]


@pytest.mark.parametrize("word", ["nope", "nthread", "n-threads", "nthread=3"])
def test_an_unknown_word_is_not_taken_for_a_number_of_threads(word: str) -> None:
    assert normalize(["migrate", f"-{word}"]) == ["migrate", f"--{word}"]


def test_other_commands_are_left_alone() -> None:
    assert normalize(["build", "-n4", "-qatest"]) == ["build", "-n4", "-qatest"]


def test_no_arguments_ask_for_help() -> None:
    assert normalize([]) == ["--help"]
