"""Keys hashed from seeds, and generators whose whole state they fill."""

import hashlib
import itertools

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dpcompanion import seeds
from dpcompanion.output_perturbation.grids import initial_weights
from dpcompanion.seeds import derive_key, derive_seed, jittered, keyed_generator, seed_torch
from dpcompanion.training import DPSGDPlan, cross_entropy, models, train

from .refusals import refuses

SEEDS = st.integers(0, 2**600)


def test_a_key_is_the_hash_that_it_is_said_to_be():
    parts = [b"noise", b"7", (300).to_bytes(2, "little")]
    text = b"dpcompanion stream\0" + b"".join(
        len(part).to_bytes(8, "little") + part for part in parts
    )
    assert derive_key(300, "noise", 7) == hashlib.sha256(text).digest()


@settings(deadline=None)
@given(
    SEEDS, SEEDS, st.sampled_from([("noise",), ("sampling",), ("noise", 1), ("noise", "one", "")])
)
def test_every_bit_of_a_seed_counts(one, other, names):
    assert (derive_key(one, *names) == derive_key(other, *names)) == (one == other)
    assert all(
        derive_key(one, *names) != derive_key(one ^ 1 << bit, *names)
        for bit in (0, 31, 32, 63, 64, 255, 700)
    )


def test_streams_of_one_seed_have_different_keys():
    names = [(), ("a",), ("a", ""), ("", "a"), ("a", "b"), ("ab",), ("a/b",)]
    keys = {derive_key(seed, *name) for seed in (0, 1, 256, 2**1024 - 1) for name in names}
    assert len(keys) == 4 * len(names) and all(len(key) == 32 for key in keys)


@given(
    st.lists(st.text() | st.integers(), max_size=3), st.lists(st.text() | st.integers(), max_size=3)
)
def test_two_names_never_share_a_stream(one, other):
    """Neither 1 and "1" nor "a/b" and "a", "b": the text of a whole number is no name."""
    for derive in (derive_key, derive_seed):
        try:
            keys = derive(0, *one), derive(0, *other)
        except ValueError:
            assert any(
                isinstance(name, str) and (set(name) & set("/0123456789")) for name in one + other
            )
        else:
            assert (keys[0] == keys[1]) == (one == other)


def test_bad_arguments_are_refused_by_name():
    # each could be taken for another name
    names = ["1", "-7", "0012", True, None, 1.5, b"noise", ("a",)]
    for derive in (derive_key, derive_seed):
        refuses(lambda names, derive=derive: derive(0, "noise", names), {}, names=names)
        refuses(
            lambda seed, derive=derive: derive(seed, "noise"),
            {},
            seed=[-1, 0.5, "7", None, True, 2**1024],
        )
    refuses(lambda names: derive_seed(0, names), {}, names=["a/b"])
    refuses(keyed_generator, {}, key=[b"", b"short", 5, "0" * 32])


def test_the_streams_of_runs_that_were_recorded_stay_as_they_are():
    assert derive_key(0, "noise").hex()[:16] == "111bc4459874f1c3"
    assert derive_key(5, "forward", 17).hex()[:16] == "4b8e7811be743d56"
    assert (
        derive_seed(3, "model", 2) == 2161865351392554829
        and derive_seed(0, "run", "add", np.int64(1)) == 3392689995473300946
    )


def test_the_whole_state_is_filled_from_the_key():
    key = derive_key(1, "state")
    oracle = np.random.MT19937()
    words = np.frombuffer(hashlib.shake_256(key).digest(4 * 624), dtype="<u4")
    oracle.state = {"bit_generator": "MT19937", "state": {"key": words, "pos": 624}}
    expected = (oracle.random_raw(2000) & (2**24 - 1)) / 2**24
    np.testing.assert_array_equal(
        torch.rand(2000, generator=keyed_generator(key)).numpy(), expected
    )


def test_seeds_that_agree_in_32_bits_give_different_numbers_everywhere():
    for one, other in itertools.combinations((3, 3 + 2**32, 3 + 2**64, 3 + 2**200), 2):
        assert derive_seed(one, "x") != derive_seed(other, "x")
        assert not torch.equal(
            *(torch.randn(5, generator=keyed_generator(derive_key(seed))) for seed in (one, other))
        )
        assert not torch.equal(*(models.linear(3, 2, seed=seed).weight for seed in (one, other)))


def test_the_global_generator_takes_the_same_state():
    key = derive_key(2, "dropout")
    with torch.random.fork_rng(devices=[]):
        seed_torch(key)
        found = torch.rand(4)
    assert torch.equal(found, torch.rand(4, generator=keyed_generator(key)))


def test_seeds_of_all_kinds_keep_their_bits():
    number = 2**62 + 1
    assert (
        len({derive_key(seed, "x") for seed in (number, np.int64(number), torch.tensor(number))})
        == 1
    )
    assert derive_key(3.0, "x") == derive_key(3, "x")


def test_the_jitter_moves_every_fresh_weight_in_its_last_places_and_only_when_it_is_asked_for(
    monkeypatch,
):
    plain, start = models.mnist_cnn(seed=0), initial_weights(5, 0, hidden=4)
    wide = torch.randn(1000, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    assert jittered(wide) is wide
    monkeypatch.setenv("DPCOMPANION_JITTER", "1e-12")
    for before, after, least in [
        (wide, jittered(wide), 1e-12),
        (start[start != 0], initial_weights(5, 0, hidden=4)[start != 0], 1e-12),
        *(
            (p, q, 2**-23)
            for p, q in zip(plain.parameters(), models.mnist_cnn(seed=0).parameters())
        ),
    ]:
        moved = (after.double() / before.double() - 1).abs()
        assert 0.4 * least <= moved.min() and moved.max() <= 2.1 * least
    assert torch.equal(jittered(torch.zeros(3)), torch.zeros(3))


def test_a_change_of_what_a_seed_draws_needs_a_new_number():
    """Where this fails, seeded runs draw otherwise than they did: raise `seeds.DRAWS`, which
    records tell.
    """
    plan = DPSGDPlan(
        n=200, sample_rate=0.05, steps=5, max_grad_norm=1.0, noise_multiplier=1.0, delta=1e-5
    )
    model = torch.nn.Linear(3, 2, bias=False)
    torch.nn.init.zeros_(model.weight)
    blank = torch.zeros(200, 3), torch.zeros(200, dtype=torch.int64)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    run = train(model, cross_entropy, blank, plan, optimizer=optimizer, seed=0, progress=False)
    noise = [round(each, 3) for each in model.weight[0].tolist()]
    sizes = [int(size) for size in run.batch_sizes]
    assert (sizes, noise, seeds.DRAWS) == ([9, 9, 8, 11, 10], [-0.181, 0.346, 0.016], 2)
