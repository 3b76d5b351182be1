"""The command line: answers, rounding to the safe side, errors and records."""

import json
import math
import re
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

import dpcompanion
from dpcompanion import accounting, cli
from dpcompanion.training import DPSGDPlan

RUN = [
    "--sample-rate",
    "512/60000",
    "--noise-multiplier",
    "3.42529",
    "--steps",
    "9375",
    "--delta",
    "1e-5",
]


def said(capsys, *arguments):
    assert cli.main(list(arguments)) == 0
    return capsys.readouterr().out


def test_the_help_keeps_names_as_they_are_written(capsys):
    with pytest.raises(SystemExit):
        cli.main(["epsilon", "--help"])
    assert "Poisson sampling" in " ".join(capsys.readouterr().out.split())


def test_epsilon_prints_the_reference_point_with_all_that_it_rests_on(capsys):
    out = said(capsys, "epsilon", *RUN, "--accountant", "rdp")
    assert out == (
        "epsilon 1.00358 at delta 1e-05 (add/remove one example, Poisson sampling, accountant "
        "rdp)\n"
    )


@pytest.mark.parametrize(
    "question, other, name",
    [
        ("noise-multiplier", ["--sample-rate", "0.01", "--steps", "1000"], "find_noise_multiplier"),
        ("sample-rate", ["--noise-multiplier", "2", "--steps", "1000"], "find_sample_rate"),
        ("steps", ["--noise-multiplier", "2", "--sample-rate", "0.01"], "find_steps"),
    ],
)
def test_each_search_answers_as_the_library_does(capsys, question, other, name):
    answer = json.loads(
        said(
            capsys,
            question,
            "--epsilon",
            "1",
            "--delta",
            "1e-5",
            *other,
            "--accountant",
            "rdp",
            "--json",
        )
    )
    given = {
        key: answer[key]
        for key in ("sample_rate", "noise_multiplier", "steps")
        if key != question.replace("-", "_")
    }
    expected = getattr(accounting, name)(
        target_epsilon=1, target_delta=1e-5, accountant="rdp", **given
    )
    assert answer[question.replace("-", "_")] == expected
    assert answer["neighbouring_relation"] and answer["sampler"] == "Poisson"


def test_runs_and_ledgers_in_files_are_composed(capsys, tmp_path):
    run, other, releases = (
        str(tmp_path / name) for name in ("run.json", "other.json", "releases.json")
    )
    for path, rate, noise in ((run, "0.01", "1"), (other, "0.02", "1.2")):
        options = [
            "--sample-rate",
            rate,
            "--noise-multiplier",
            noise,
            "--steps",
            "500",
            "--delta",
            "1e-5",
            "--json",
        ]
        with open(path, "w") as file:
            file.write(said(capsys, "epsilon", *options))
    both = json.loads(said(capsys, "ledger", run, other, "--json"))
    assert both["epsilon"] == pytest.approx(2.347, abs=5e-4) and len(both["ledger"]) == 2
    accounting.Ledger([accounting.Gaussian(10.0)]).to_json(releases)
    more = said(capsys, "ledger", run, other, releases, "--delta", "1e-6")
    assert "1e-06" in more and "500 steps" in more and "Gaussian" in more
    assert both["neighbouring_relation"] == "add or remove one example"
    laplace = accounting.LedgerEntry(accounting.Laplace(10.0), relation="zero-out", unit="patient")
    accounting.Ledger([laplace]).to_json(releases)
    alone = said(capsys, "ledger", releases, "--json")
    assert json.loads(alone)["neighbouring_relation"].startswith(
        "leave out the data of one patient"
    )
    (tmp_path / "alone.json").write_text(alone)
    assert "one patient" in said(capsys, "ledger", str(tmp_path / "alone.json"))
    (tmp_path / "alone.json").write_text(
        alone.replace("of one patient", "of one example").replace("of patients", "of examples")
    )
    assert "one patient" in said(capsys, "ledger", str(tmp_path / "alone.json"))
    plan = DPSGDPlan.for_epsilon(2.0, n=900, batch_size=90, epochs=3, max_grad_norm=1.0, delta=1e-4)
    plan.to_json(tmp_path / "plan.json")
    of_plan = said(capsys, "ledger", str(tmp_path / "plan.json"), "--delta", "1e-4")
    piped = subprocess.run(
        [sys.executable, "-m", "dpcompanion", "ledger", "/dev/stdin", "--delta", "1e-4"],
        input=plan.to_json(),
        text=True,
        capture_output=True,
        check=True,
    )
    assert piped.stdout == of_plan
    assert of_plan.strip() == accounting.Ledger().add(plan).statement(1e-4)
    assert (
        "leave out"
        in json.loads(said(capsys, "ledger", run, releases, "--json"))["neighbouring_relation"]
    )
    replaced = said(capsys, "ledger", run, other, "--relation", "replace")
    assert "replaces" in replaced and float(re.findall(r"epsilon (\d\.\d+)", replaced)[0]) > 2.4
    with open(run, "w") as file:
        file.write('{"accuracy": 0.9}')
    assert cli.main(["ledger", run, other]) == 2 and run in capsys.readouterr().err
    assert cli.main(["ledger", str(tmp_path / "none.json")]) == 2


def test_a_delta_of_one_over_n_or_more_gets_a_warning(capsys):
    for examples, warned in (
        ("1000", False),
        ("99999", False),
        ("100000", True),
        ("10000000", True),
    ):
        assert cli.main(["epsilon", *RUN, "--examples", examples, "--accountant", "rdp"]) == 0
        assert ("1/n" in capsys.readouterr().err) == warned


@pytest.mark.parametrize("short", [["--n", "60000"], ["--st", "5"], ["--acc", "rdp"]])
def test_an_abbreviated_option_is_refused(capsys, short):
    with pytest.raises(SystemExit) as stop:
        cli.main(
            [
                "epsilon",
                "--sample-rate",
                "0.01",
                "--steps",
                "100",
                "--noise-multiplier",
                "1",
                "--delta",
                "1e-5",
                *short,
            ]
        )
    assert stop.value.code == 2 and short[0] in capsys.readouterr().err


def test_json_of_an_infinite_epsilon_is_valid_json(capsys):
    out = said(
        capsys,
        "epsilon",
        "--sample-rate",
        "1",
        "--noise-multiplier",
        "0",
        "--steps",
        "1",
        "--delta",
        "1e-5",
        "--json",
    )
    assert json.loads(out)["epsilon"] == "inf"


@given(st.floats(1e-12, 1e12))
def test_printed_answers_are_rounded_to_the_safe_side(value):
    up, down = cli.rounded(value, math.ceil), cli.rounded(value, math.floor)
    assert down <= value <= up and float(cli.exactly(down)) <= value <= float(cli.exactly(up))
    assert up - down <= 1.001e-5 * value


@pytest.mark.parametrize(
    "value, toward, printed",
    [
        (1.0000001e-6, math.ceil, 1.00001e-6),
        (0.3, math.floor, 0.3),
        (0.1, math.ceil, 0.1),
        (2.0, math.ceil, 2.0),
        (math.nextafter(14.245, 15), math.ceil, 14.2451),
        (math.nextafter(8.44754e-07, 0), math.floor, 8.44753e-07),
    ],
)
def test_a_number_of_few_digits_stays_and_its_neighbour_goes_to_the_safe_side(
    value, toward, printed
):
    assert cli.rounded(value, toward) == printed


@pytest.mark.parametrize("delta", ["1.2345642e-05", "0.0000100000049", "1e-05"])
def test_a_given_delta_and_epsilon_are_printed_with_all_their_digits(capsys, delta):
    out = said(
        capsys,
        "steps",
        "--epsilon",
        "1.0000049",
        "--delta",
        delta,
        "--sample-rate",
        "0.01",
        "--noise-multiplier",
        "1",
        "--accountant",
        "rdp",
    )
    words = out.split()
    assert words[words.index("epsilon") + 1] == "1.0000049"
    assert float(words[words.index("delta") + 1]) == float(delta)


@pytest.mark.parametrize(
    "arguments, words",
    [
        (["epsilon", *RUN[:-1], "2"], "delta"),
        (["epsilon", *RUN, "--accountant", "gdp"], "accountant"),
        (
            [
                "steps",
                "--epsilon",
                "1",
                "--delta",
                "1e-5",
                "--sample-rate",
                "0.5",
                "--noise-multiplier",
                "0.1",
            ],
            "cannot be met",
        ),
        (["run", "no-such/exhibit"], "name"),
    ],
)
def test_a_mistake_is_one_line_on_stderr_and_status_2(capsys, arguments, words):
    assert cli.main(arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and words in captured.err and captured.err.count("\n") == 1


@pytest.mark.parametrize("rate", ["1/0", "x", "1_0", "1/1_0"])
def test_an_unreadable_number_is_refused(capsys, rate):
    with pytest.raises(SystemExit) as stop:
        cli.main(["epsilon", "--sample-rate", rate, *RUN[2:]])
    assert stop.value.code == 2 and "512/60000" in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments, said",
    [
        (["--epsilon", "1", "--target-epsilon", "8", "--delta", "1e-5"], "--epsilon"),
        (["--epsilon", "1", "--delta", "1e-5", "--delta", "1e-2"], "--delta"),
        (
            ["--epsilon", "1", "--delta", "1e-5", "--accountant", "rdp", "--accountant", "pld"],
            "--accountant: given",
        ),
    ],
)
def test_of_two_values_of_an_option_none_is_lost(capsys, arguments, said):
    with pytest.raises(SystemExit) as stop:
        cli.main(["noise-multiplier", "--sample-rate", "0.01", "--steps", "1000", *arguments])
    assert stop.value.code == 2 and said in capsys.readouterr().err


def test_run_writes_a_record_and_list_shows_it(capsys, tmp_path):
    assert "table-5  " in said(capsys, "list", "--out", str(tmp_path))
    out = said(capsys, "run", "idp-sgd/table-5", "--out", str(tmp_path))
    assert "mnist.sigma" in out and (tmp_path / "idp-sgd" / "table-5.quick.json").exists()
    entries = json.loads(said(capsys, "list", "--out", str(tmp_path), "--json"))
    state = {entry["name"]: entry["records"].get("quick") for entry in entries}
    assert state["idp-sgd/table-5"] == "fresh" and state["idp-sgd/table-7"] == "missing"


def test_a_damaged_record_of_the_paper_is_a_warning_beside_a_run_that_succeeded(capsys, tmp_path):
    (tmp_path / "idp-sgd").mkdir()
    (tmp_path / "idp-sgd" / "table-5.paper.json").write_text("{", encoding="utf-8")
    assert cli.main(["run", "idp-sgd/table-5", "--preset", "quick", "--out", str(tmp_path)]) == 0
    captured = capsys.readouterr()
    assert "mnist.sigma" in captured.out and "table-5.quick.json" in captured.out
    assert "warning" in captured.err and "table-5.paper.json is damaged" in captured.err
    assert captured.err.count("\n") == 1


@pytest.mark.parametrize(
    "option, value, words",
    [("--device", "meta", "device"), ("--out", __file__, "out"), ("--seeds", "1", "seeds")],
)
def test_a_run_that_cannot_work_ends_in_one_line_before_it_begins(
    capsys, tmp_path, option, value, words
):
    options = {"--preset": "quick", "--out": str(tmp_path), option: value}
    assert (
        cli.main(["run", "idp-sgd/table-5", *(word for pair in options.items() for word in pair)])
        == 2
    )
    captured = capsys.readouterr()
    assert captured.out == "" and words in captured.err and captured.err.count("\n") == 1
    assert not list(tmp_path.iterdir())


def test_the_command_is_there_without_importing_anything_heavy_for_its_help():
    code = "import sys, dpcompanion.cli as c\ntry: c.main(['--help'])\nexcept SystemExit: pass\n"
    code += "sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True).returncode == 0


def test_the_module_is_the_command_and_says_its_version():
    done = subprocess.run(
        [sys.executable, "-m", "dpcompanion", "--version"],
        capture_output=True,
        text=True,
        encoding="utf-8",
    )
    assert (done.returncode, done.stdout) == (0, f"dpcompanion {dpcompanion.__version__}\n")


@pytest.mark.slow
def test_a_reader_who_has_seen_enough_ends_the_command_quietly():
    command = [sys.executable, "-m", "dpcompanion", "epsilon", *RUN, "--accountant", "rdp"]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, encoding="utf-8"
    ) as process:
        process.stdout.close()
        assert process.stderr.read() == ""
    assert process.returncode == 141


def test_a_ledger_keeps_the_relation_of_its_files(capsys, tmp_path):
    file = tmp_path / "replace.json"
    accounting.Ledger([accounting.Gaussian(5.0)], relation="replace").to_json(file)
    assert cli.main(["ledger", str(file)]) == 0
    assert "that replaces another" in capsys.readouterr().out
    accounting.Ledger().to_json(tmp_path / "empty.json")
    assert cli.main(["ledger", str(file), str(tmp_path / "empty.json")]) == 2
    assert "empty.json: no run or release is in it" in capsys.readouterr().err
    assert cli.main(["ledger", str(tmp_path / "none.json")]) == 2
    assert "No such file" in capsys.readouterr().err
    assert cli.main(["ledger", str(tmp_path)]) == 2
    assert "directory" in capsys.readouterr().err.lower()


def test_a_name_that_is_nearly_right_is_answered_with_the_nearest(capsys):
    assert cli.main(["run", "idp-sgd/table7"]) == 2
    said = capsys.readouterr().err
    assert "'idp-sgd/table-7'" in said and len(said) < 300
    assert cli.main(["run", "idp-sgd/table-3"]) == 2
    assert "preset must be given" in capsys.readouterr().err
