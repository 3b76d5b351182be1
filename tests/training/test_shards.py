"""The engine on a model after `fully_shard` ends where it does in one process, with noise added
once, and what would change its sums is refused or has no effect.
"""

import contextlib

import pytest
import torch
from scipy import stats

pytest.importorskip("opacus")
pytest.importorskip("torch", minversion="2.13")  # whose groups of shards are known

import ranks
import shards

pytestmark = pytest.mark.filterwarnings("ignore:Full backward hook")
FALSE_ALARM = 1e-6  # the probability with which a right engine would fail
SHARDED = {"how": "in order"}


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    folder = tmp_path_factory.mktemp("two")
    with contextlib.closing(ranks.Pool(2, folder, cases="shards")) as found:
        yield found


@pytest.fixture(scope="module")
def four(tmp_path_factory):
    folder = tmp_path_factory.mktemp("four")
    with contextlib.closing(ranks.Pool(4, folder, cases="shards")) as found:
        yield found


def check_as_alone(found, alone, tolerance=1e-8):
    """Every rank has a part of the run of one process, up to the order of sums."""
    assert isinstance(found[0], dict), found
    for one in found:
        assert one["steps"] == alone["steps"] and one["statement"] == alone["statement"]
        assert one["drawn"].equal(alone["drawn"]) and one["epsilons"].equal(alone["epsilons"])
        for name in ("weights", "gradients"):
            torch.testing.assert_close(one[name], alone[name], rtol=tolerance, atol=tolerance)
    assert sum(one["sizes"] for one in found).equal(alone["drawn"])
    assert sum(one["parts"] for one in found) == alone["parts"] > max(o["parts"] for o in found)


def refusals(found):
    """What each rank said: the same error, or which rank raised it."""
    assert not any(isinstance(one, dict) for one in found), found
    return [said for _, said in found]


def test_shards_on_two_ranks_end_where_one_process_does(two):
    check_as_alone(two("run", **SHARDED), shards.run())
    for said in refusals(two("run", how="half")):
        assert "fully_shard(module) last" in said


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {"method": "sample"},
        {"name": "words"},
        {"name": "words", "how": "root"},
        {"name": "again"},
        {"dtype": torch.float32, "name": "words"},
        {"kind": "adam"},
        {"batch": 1, "epochs": 1},  # draws of nobody, and of fewer than there are ranks
        {"batch": 1, "epochs": 1, "name": "words"},
        {"loss_reduction": "sum"},
        {"prove": False},
        {"how": "root"},
        {"how": "kept"},
        {"how": "along"},
    ],
    ids=str,
)
def test_every_kind_of_run_on_shards_ends_where_that_of_one_process_does(options, two, four):
    alone = shards.run(**options | {"how": None})
    tolerance = 1e-5 if options.get("dtype") == torch.float32 else 1e-8
    for pool in two, four:
        check_as_alone(pool("run", **SHARDED | options), alone, tolerance)


@pytest.mark.slow
@pytest.mark.parametrize("on", [None, 1])
@pytest.mark.parametrize("do", ["divide", "average", "no reduction"])
def test_settings_of_reductions_have_no_effect_on_a_step(do, on, two):
    check_as_alone(two("run", **SHARDED, do=do, on=on), shards.run())


@pytest.mark.slow
@pytest.mark.parametrize("do", ["evaluate", "two passes", "left over", "another group"])
def test_what_is_done_between_steps_on_all_ranks_has_no_effect(do, two):
    check_as_alone(two("run", **SHARDED, do=do), shards.run())


@pytest.mark.slow
@pytest.mark.parametrize(
    "options, named",
    [
        ({"how": "two roots"}, "the module itself was not"),
        ({"how": "ignored"}, "'0.weight' is no parameter that fully_shard cut"),
        ({"how": "frozen whole", "name": "words"}, "'frozen.weight' is no parameter"),
        ({"how": "types"}, "without mp_policy"),
        ({"how": "cast"}, "without mp_policy"),
        ({"how": "offloaded"}, "without offload_policy"),
        ({"how": "alone"}, "with all 2 ranks"),
        ({"name": "tied", "how": "root"}, "share no weight"),
        ({"name": "tied"}, "shared"),
        ({"name": "mixing"}, "mixes examples"),
        ({"name": "twice"}, "called a second time"),
        ({"name": "apart"}, "outside of its layer"),
        ({"name": "apart", "how": "root"}, "outside of its layer"),
        ({"name": "batch norm"}, "BatchNorm1d"),
        ({"name": "unknown"}, "PReLU"),
        ({"mode": "hooks"}, "the engine takes fully_shard in ghost mode"),
        ({"wrap_model": False}, "wrap_model must be True"),
        ({"filter": 0.3}, "where a filter measures norms"),
        ({"pieces": 2}, "leave out BatchMemoryManager"),
        ({"differs": "seed"}, "seed"),
        ({"differs": "data"}, "data"),
        ({"penalty": True}, "as in a penalty"),
        ({"do": "leave unreduced"}, "that did not go through it"),
        ({"do": "hook"}, "without hooks on its parameters"),
        ({"do": "hook", "on": 1}, "without hooks on its parameters"),
        ({"do": "tensor hook"}, "without hooks on its parameters"),
        ({"do": "hook within"}, "by autograd"),
        ({"do": "reduce by oneself"}, "got Louder"),
        ({"do": "unfreeze", "name": "words"}, "frozen.weight"),
        ({"do": "plain loss"}, "gradients must stay"),
        ({"do": "louder"}, "gradients must stay"),
        ({"do": "exchange"}, "gradients must stay"),
        ({"do": "more rows", "on": 1}, "what the loader handed out last"),
        ({"do": "fewer rows", "on": 1}, "what the loader handed out last"),
        ({"do": "nothing in it", "on": 1}, "must be finite"),
        ({"do": "fail", "on": 1}, "not callable"),
        ({"how": None, "do": "shard"}, "must keep the trainable parameters"),
    ],
    ids=str,
)
def test_what_would_change_sums_of_shards_is_refused_on_all_ranks(options, named, two):
    for said in refusals(two("run", **SHARDED | options)):
        assert named in said


@pytest.mark.slow
def test_a_mesh_of_two_axes_is_refused(four):
    for said in refusals(four("run", how="two axes")):
        assert "a mesh of one axis with all 4 ranks" in said


@pytest.mark.slow
def test_noise_is_added_once_to_each_part_and_its_key_stays_on_rank_0(two):
    one, other = two("run", **SHARDED, seed=None, batch=1, epochs=5)
    assert one["gradients"].equal(other["gradients"])
    assert one["keys"]["sampling"] == other["keys"]["sampling"]
    assert one["keys"]["noise"] != other["keys"]["noise"]
    noise = one["gradients"][one["drawn"] == 0] / one["noise"]
    assert len(noise) > 40 and noise.shape[1] == one["parts"] + other["parts"]
    noise = noise.flatten()
    low, high = stats.chi2.ppf([FALSE_ALARM / 2, 1 - FALSE_ALARM / 2], noise.numel())
    assert low < noise.square().sum() < high
    assert stats.kstest(noise.numpy(), "norm").pvalue > FALSE_ALARM


@pytest.mark.slow
def test_a_run_on_shards_goes_on_from_its_account_and_the_weights_beside_it(two, four, tmp_path):
    path, alone = tmp_path / "run.pt", shards.run()
    check_as_alone(two("run", **SHARDED, do="save", at=5, path=path), alone)
    for pool in two, four:
        for one in pool("run", **SHARDED, path=path, goes_on=True):
            assert one["steps"] == 10
            torch.testing.assert_close(one["weights"], alone["weights"], rtol=1e-8, atol=1e-8)
    with pytest.raises(ValueError, match="path must be that of .* whose module was whole"):
        shards.run(path=path, goes_on=True)
