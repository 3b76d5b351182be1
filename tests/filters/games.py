"""Slow and plain oracles for games: every strategy of a short one, and strategies played on the
real mechanism.
"""

import itertools
import math

import numpy as np


def every_strategy(pairs, costs, budget, epsilon, direction, stages):
    """Delta of every strategy of at most `stages` stages, by its joint distributions: a list.

    A strategy says for every sequence of outputs so far which pair comes next; None stops.
    """
    pairs = [(p, q) if direction == "remove" else (q, p) for p, q in pairs]
    outputs = len(pairs[0][0])
    nodes = [
        node
        for length in range(stages)
        for node in itertools.product(range(outputs), repeat=length)
    ]
    found = []
    for moves in itertools.product([None, *range(len(pairs))], repeat=len(nodes)):
        strategy, delta, allowed = dict(zip(nodes, moves)), 0.0, True
        stack = [((), 1.0, 1.0, 0)]
        while stack:
            node, p, q, spent = stack.pop()
            move = strategy.get(node)
            if move is None:
                delta += max(p - math.exp(epsilon) * q, 0.0)
                continue
            if spent + costs[move] > budget:
                allowed = False
                break
            for output in range(outputs):
                stack.append(
                    (
                        (*node, output),
                        p * pairs[move][0][output],
                        q * pairs[move][1][output],
                        spent + costs[move],
                    )
                )
        if allowed:
            found.append(delta)
    return found


def played(
    strategy,
    *,
    sample_rate,
    noise_multiplier,
    levels,
    costs,
    budget,
    epsilon,
    direction,
    proposals,
    runs=200_000,
    seed=0,
    groups=1,
):
    """Delta of a strategy on the sampled Gaussian mechanism, by importance sampling: (estimate,
    standard error).

    Args:
        strategy: (budget left, loss so far, which run) -> level index, -1 to leave a unit of the
            budget unspent; arrays of runs.
        proposals: (K,) for each level by how many noise standard deviations the outputs are pushed
            towards large losses, at the rate with which they come from the pushed Gaussian: pairs
            (push, rate).
    """
    generator = np.random.default_rng(seed)
    loss, log_weight, left = np.zeros(runs), np.zeros(runs), np.full(runs, budget)
    shifts = np.array(levels) / noise_multiplier
    pushes, rates = np.array(proposals).T
    costs = np.array(costs)
    going = left >= costs.min()
    while going.any():
        who = going.nonzero()[0]
        move = strategy(left[who], loss[who], who)
        left[who[move < 0]] -= 1
        who, move = who[move >= 0], move[move >= 0]
        if len(who):
            shift = shifts[move]
            q, push, rate = sample_rate, pushes[move], rates[move]
            pushed = generator.random(len(who)) < rate
            if direction == "remove":
                included = generator.random(len(who)) < q
                y = generator.standard_normal(len(who)) + np.where(
                    pushed, push, np.where(included, shift, 0.0)
                )
            else:
                y = generator.standard_normal(len(who)) - np.where(pushed, push, 0.0)
                push = -push
            ratio = np.log1p(q * np.expm1(y * shift - shift**2 / 2))  # ln of mixture over N(0, 1)
            target = ratio if direction == "remove" else 0.0
            log_push = y * push - push**2 / 2
            log_weight[who] += target - np.logaddexp(
                np.log1p(-rate) + target, np.log(rate) + log_push
            )
            loss[who] += ratio if direction == "remove" else -ratio
            left[who] -= costs[move]
        going = left >= costs.min()
    values = np.exp(log_weight) * np.maximum(-np.expm1(epsilon - loss), 0)
    values = values.reshape(-1, groups)  # run i belongs to group i modulo their number
    mean, deviation = values.mean(axis=0), values.std(axis=0) / math.sqrt(len(values))
    return (mean, deviation) if groups > 1 else (mean[0], deviation[0])


def maximising(game):
    """The strategy that a `Game` with choices found."""

    def strategy(left, loss, who):
        place = np.rint(loss / game.interval).astype(int) - game.first
        return game.choices[left, place.clip(0, game.choices.shape[1] - 1)].astype(int)

    return strategy


def constant(level, costs):
    def strategy(left, loss, who):
        return np.where(left >= costs[level], level, -1)

    return strategy
