"""Runs on several processes end where those of one do, and no rank goes on without the others."""

import contextlib
import os
import pathlib
import subprocess
import sys

import pytest
import ranks
import torch
from scipy import stats

from dpcompanion.training import distributed

from ..refusals import refused

pytestmark = pytest.mark.filterwarnings("ignore:Full backward hook")
FALSE_ALARM = 1e-6  # the probability with which a right trainer would fail


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    with contextlib.closing(ranks.Pool(2, tmp_path_factory.mktemp("two"))) as found:
        yield found


@pytest.fixture(scope="module")
def four(tmp_path_factory):
    with contextlib.closing(ranks.Pool(4, tmp_path_factory.mktemp("four"))) as found:
        yield found


def check_alike(found):
    """All ranks have the same run, to the last bit."""
    first, *others = found
    assert isinstance(first, dict), first
    for other in others:
        for name in ("weights", "losses", "sizes", "epsilons", "gradients"):
            torch.testing.assert_close(other[name], first[name], rtol=0, atol=0, equal_nan=True)
        for name in ("indices", "norms", "estimates"):
            assert all(map(torch.equal, other[name], first[name])), name
        assert other["statement"] == first["statement"] and other["steps"] == first["steps"]
    return first


def check_as_alone(found, alone, tolerance=1e-9):
    """The run of several ranks is that of one process, up to the order of sums."""
    first = check_alike(found)
    assert first["sizes"].equal(alone["sizes"]) and first["statement"] == alone["statement"]
    assert all(map(torch.equal, first["indices"], alone["indices"]))
    assert [norms.dtype for norms in first["norms"]] == [norms.dtype for norms in alone["norms"]]
    for name in ("weights", "losses", "epsilons", "gradients", "norms", "estimates"):
        torch.testing.assert_close(
            first[name], alone[name], rtol=tolerance, atol=tolerance, equal_nan=True
        )
    if alone["spent"] is not None:
        torch.testing.assert_close(first["spent"], alone["spent"], rtol=1e-6, atol=1e-9)


def refusals(found, *kinds):
    """The messages of what ranks raised, of these kinds."""
    assert [one[0] for one in found] == list(kinds), found
    return [one[1] for one in found]


def torchrun(program, folder):
    """What a program prints that `torchrun` starts twice, and once more where one of the two
    dies.
    """
    launch = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node=2",
        "--max-restarts=1",
    ]
    # With the store of torchrun's own, processes that start again look for the ports of those
    # before them.
    environment = os.environ | {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    done = subprocess.run(
        [*launch, str(program), str(folder)],
        check=True,
        capture_output=True,
        env=environment,
        encoding="utf-8",
    )
    return done.stdout


def test_two_ranks_end_where_one_process_does(two):
    found = two("fit", track={"clipping": "individual", "updates_per_epoch": 2})
    check_as_alone(found, ranks.fit(track={"clipping": "individual", "updates_per_epoch": 2}))
    for text in refusals(two("differing", what="plan"), "ValueError", "ValueError"):
        assert "plan" in text and "rank 1" in text
    own, told = refusals(
        two("fit", do="fail", at=3, on_rank=0), "FloatingPointError", "RuntimeError"
    )
    assert "rank 0" in told and own in told


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {"method": "mixed"},
        {"method": "ghost"},
        {"method": "func"},
        {"dtype": torch.float32},
        {"filter": 4.0},
        {"track": {"clipping": "maximum", "running": True, "updates_per_epoch": 0}},
        {"trackers": [{"updates_per_epoch": 3}, {"running": True}]},
        {"plan": {"budgets": "sample"}},
        {"plan": {"budgets": "scale"}},
        # draws of nobody, and of fewer than there are ranks
        {"plan": {"sample_rate": 0.03, "steps": 20}},
        {"plan": {"sample_rate": 0.03, "steps": 20}, "filter": 1.0},
        {"plan": {"sample_rate": 1.0}},
        {"form": "items"},
        {"form": "persons", "trackers": []},
    ],
    ids=str,
)
def test_every_kind_of_run_ends_where_that_of_one_process_does(options, two, four):
    if options.get("form") == "persons":
        options = options | {"plan": {"n": 9}}
    alone = ranks.fit(**options)
    tolerance = 1e-5 if options.get("dtype") == torch.float32 else 1e-9
    check_as_alone(two("fit", **options), alone, tolerance)
    check_as_alone(four("fit", **options), alone, tolerance)


@pytest.mark.slow
def test_what_models_draw_differs_from_rank_to_rank_and_their_weights_do_not(two):
    first = check_alike(two("fit", dropout=0.5))
    assert first["sizes"].equal(ranks.fit(dropout=0.5)["sizes"])


@pytest.mark.slow
@pytest.mark.skipif(
    not torch.ops.mkldnn._is_mkldnn_bf16_supported(), reason="the processor has no bfloat16"
)
def test_bf16(two):
    options = {
        "precision": "bf16",
        "dtype": torch.float32,
        "plan": {"sample_rate": 0.03, "steps": 20},
    }
    check_as_alone(two("fit", **options), ranks.fit(**options), tolerance=0.05)


@pytest.mark.slow
def test_sums_that_count_what_floats_do(two):
    options = {"plan": {"arithmetic": "float", "parameters": 51, "sample_rate": 0.03}, "seed": None}
    first = check_alike(two("fit", **options, dtype=torch.float32))
    assert first["steps"] == ranks.STEPS and "51 parameters" in first["statement"]


@pytest.mark.slow
def test_noise_is_added_once(two):
    steps = 200
    one, other = two("quiet", steps=steps)
    assert torch.equal(one, other)
    low, high = stats.chi2.ppf([FALSE_ALARM / 2, 1 - FALSE_ALARM / 2], one.numel())
    assert low < one.square().sum() < high and one.numel() == 51 * steps
    assert stats.kstest(one.numpy(), "norm").pvalue > FALSE_ALARM


@pytest.mark.slow
def test_without_a_seed_ranks_share_the_draws_and_rank_0_keeps_the_key_of_the_noise(two):
    one, other = two("keys")
    assert one["sampling"] == other["sampling"] and one["noise"] != other["noise"]
    check_alike(two("fit", seed=None))


@pytest.mark.slow
@pytest.mark.parametrize(
    "what, named",
    [
        ("data", "data"),
        ("model", "model"),
        ("frozen", "model"),
        ("mode", "model"),
        ("seed", "seed"),
        ("no seed", "seed"),
        ("method", "method"),
        ("track", "trackers"),
        ("filter", "trackers"),
    ],
)
def test_ranks_that_were_given_different_things_are_refused_on_all_of_them(what, named, two):
    for text in refusals(two("differing", what=what), "ValueError", "ValueError"):
        assert named in text and "rank 1" in text


@pytest.mark.slow
def test_what_one_rank_refuses_no_rank_begins(two):
    told, own = refusals(two("differing", what="unknown"), "ValueError", "ValueError")
    assert "seed" in own and "rank 1" in told and own in told


@pytest.mark.slow
@pytest.mark.parametrize("do, own", [("fail", "FloatingPointError"), ("lose the disk", "OSError")])
def test_a_rank_that_fails_ends_all(do, own, four):
    found = refusals(
        four("fit", form="items", do=do, at=5, on_rank=1),
        "RuntimeError",
        own,
        "RuntimeError",
        "RuntimeError",
    )
    assert all("rank 1" in told and own in told for told in found[:1] + found[2:])


@pytest.mark.slow
def test_weights_that_become_different_are_refused(two):
    for text in refusals(two("fit", do="drift", at=5, on_rank=1), "ValueError", "ValueError"):
        assert "weights" in text and "rank 1" in text


@pytest.mark.slow
def test_a_run_that_one_rank_stops_has_the_same_length_everywhere(two):
    first = check_alike(two("fit", do="stop", at=5, on_rank=1))
    assert first["stopped"] and first["steps"] == 5 == len(first["sizes"])


@pytest.mark.slow
@pytest.mark.parametrize("seed", [5, None])
def test_ctrl_c_on_one_rank_ends_all_after_the_step_and_the_run_goes_on_from_there(
    seed, two, four, tmp_path
):
    path = tmp_path / "run.pt"
    options = {"seed": seed, "filter": 4.0, "path": path, "every": 100}
    refusals(two("fit", **options, do="interrupt", at=5, on_rank=1), *["KeyboardInterrupt"] * 2)
    kept = path.read_bytes(), seed is None and (tmp_path / "run.pt.key").read_bytes()
    ends = [check_alike(two("fit", **options))]
    assert len(ends[0]["indices"]) == ranks.STEPS - 5 and not (tmp_path / "run.pt.key").exists()
    for go_on in (two, four):  # again from there, and with other ranks
        path.write_bytes(kept[0])
        if kept[1]:
            (tmp_path / "run.pt.key").write_bytes(kept[1])
        ends.append(check_alike(go_on("fit", **options)))
    check_alike(ends[:2])
    if seed is not None:
        torch.testing.assert_close(ends[0]["weights"], ends[2]["weights"], rtol=1e-9, atol=1e-9)
    assert ends[0]["sizes"].equal(ends[2]["sizes"])
    if seed is not None:
        unbroken = check_alike(two("fit", seed=seed, filter=4.0))
        assert torch.equal(unbroken["weights"], ends[0]["weights"])
        assert torch.equal(unbroken["epsilons"], ends[0]["epsilons"])


@pytest.mark.slow
def test_a_rank_that_is_lost_and_comes_back_goes_on_from_the_checkpoint(two, tmp_path):
    unbroken = check_alike(two("fit"))
    torchrun(ranks.__file__, tmp_path)
    assert (tmp_path / "lost").exists()
    found = torch.load(tmp_path / "weights.pt", weights_only=True)
    assert (
        torch.equal(found["weights"], unbroken["weights"])
        and found["steps taken at last"] == ranks.STEPS - 6
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    "what, named",
    [
        ("wrapped", "module"),
        ("ensemble", "train_ensemble"),
        ("sharded", "FSDPModule"),
        (
            "sharded engine",
            "module must be a plain module, whole on each process, but it is or holds FSDPModule",
        ),
    ],
)
def test_what_runs_in_one_process_is_refused_on_several(what, named, two):
    for text in refusals(two("refused", what=what), "ValueError", "ValueError"):
        assert named in text


def check_engine_as_alone(found, alone):
    """The run of the engine on several ranks is that of one process, up to the order of sums."""
    first, *others = found
    assert isinstance(first, dict), first
    for other in others:
        assert torch.equal(other["weights"], first["weights"]) and torch.equal(
            other["gradients"], first["gradients"]
        )
        assert torch.equal(other["epsilons"], first["epsilons"])
    for name in ("steps", "statement"):
        assert all(each[name] == alone[name] for each in found), name
    for name in ("weights", "gradients", "epsilons"):
        torch.testing.assert_close(first[name], alone[name], rtol=1e-8, atol=1e-9)
    if alone["spent"] is not None:
        assert all(torch.equal(each["spent"], first["spent"]) for each in others)
        torch.testing.assert_close(first["spent"], alone["spent"], rtol=1e-6, atol=1e-9)
    return first


def test_the_engine_on_two_ranks_ends_where_it_does_on_one(two):
    pytest.importorskip("opacus")
    found, alone = two("engine"), ranks.engine()
    check_engine_as_alone(found, alone)
    for (whole, one), (again, other), (wanted, all_of_them) in zip(
        *(each["drawn"] for each in (*found, alone))
    ):
        assert whole == again == wanted == all_of_them == one + other
    for text in refusals(two("engine", differs="data"), "ValueError", "ValueError"):
        assert "data" in text and "rank 1" in text


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {"method": "scale"},
        {"mode": "functorch"},
        {"mode": "ew"},
        {"mode": "ghost"},
        {"pieces": 2},
        {"people": True},
        {"people": True, "filter": 0.3},
        {"filter": 0.3},
        {"filter": 0.3, "pieces": 2},
        {"filter": 0.3, "mode": "ghost"},
        {"filter": 0.3, "given": True},
    ],
    ids=str,
)
def test_every_kind_of_run_of_the_engine_ends_where_that_of_one_process_does(options, two, four):
    pytest.importorskip("opacus")
    alone = ranks.engine(**options)
    check_engine_as_alone(two("engine", **options), alone)
    check_engine_as_alone(four("engine", **options), alone)


@pytest.mark.slow
def test_without_a_seed_ranks_of_the_engine_share_the_draws_and_rank_0_keeps_the_key_of_the_noise(
    two, tmp_path
):
    pytest.importorskip("opacus")
    one, other = two("engine", seed=None, people=True, do="save", at=4, path=tmp_path / "run.pt")
    assert torch.equal(one["weights"], other["weights"])
    assert (
        one["keys"]["sampling"] == other["keys"]["sampling"]
        and one["keys"]["noise"] != other["keys"]["noise"]
    )


@pytest.mark.slow
@pytest.mark.parametrize("seed", [5, None])
def test_a_run_of_the_engine_goes_on_from_a_checkpoint_on_any_number_of_ranks(
    seed, two, four, tmp_path
):
    pytest.importorskip("opacus")
    options = {"seed": seed, "path": tmp_path / "run.pt"}
    if seed is None:  # as of a run that is cut off: one that ends leaves no keys
        whole = two("engine", **options, do="save", at=5)
        assert whole[0]["steps"] == 15 and isinstance(
            four("engine", **options, goes_on=True)[0], dict
        )
        return
    whole = two("engine", **options, do="save", at=5)
    for found in (two("engine", **options, goes_on=True), four("engine", **options, goes_on=True)):
        assert all(torch.equal(each["weights"], found[0]["weights"]) for each in found)
        assert found[0]["steps"] == 10
        torch.testing.assert_close(found[0]["weights"], whole[0]["weights"], rtol=1e-8, atol=1e-9)


@pytest.mark.slow
@pytest.mark.parametrize("what", ["model", "seed", "budgets", "people"])
def test_ranks_of_the_engine_that_were_given_different_things_are_refused_on_all_of_them(what, two):
    pytest.importorskip("opacus")
    named = {"people": "data"}.get(what, what)
    for text in refusals(
        two("engine", differs=what, people=what == "people"), "ValueError", "ValueError"
    ):
        assert named in text and "rank 1" in text


@pytest.mark.slow
def test_a_rank_of_the_engine_that_fails_ends_all(two):
    pytest.importorskip("opacus")
    told, own = refusals(two("engine", differs="refused"), "ValueError", "ValueError")
    assert "target_delta" in own and "rank 1" in told and own in told
    told, own = refusals(two("engine", do="fail", at=4), "RuntimeError", "TypeError")
    assert "rank 1" in told and own in told
    for text in refusals(two("engine", do="drift", at=6), "ValueError", "ValueError"):
        assert "weights" in text and "rank 1" in text


@pytest.mark.slow
def test_draws_of_a_gpu_are_refused_on_several(two):
    for text in refusals(two("fit", generator_device="cuda"), "ValueError", "ValueError"):
        assert "generator_device" in text


@pytest.mark.slow
def test_the_program_to_start_from_runs_and_goes_on(tmp_path):
    program = pathlib.Path(__file__).parents[2] / "examples" / "several_processes.py"
    printed = torchrun(program, tmp_path)
    assert "Epsilon 4.000" in printed and (tmp_path / "model.pt").exists()
    assert torchrun(program, tmp_path) == printed  # from the checkpoint of the run that has ended


def test_processes_of_torchrun_without_a_group_are_refused(monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    refused("init_process_group", ranks.fit)


@pytest.mark.parametrize("size", [1, 2, 3, 7])
@pytest.mark.parametrize("n", [0, 1, 2, 6, 100])
def test_shares_are_all_items_once_and_even(n, size, monkeypatch):
    shares = []
    for rank in range(size):
        one = distributed.Ranks()
        one.rank, one.size = rank, size
        shares.append(range(n)[one.share(n)])
    assert [i for share in shares for i in share] == list(range(n))
    assert max(map(len, shares)) - min(map(len, shares)) <= 1
