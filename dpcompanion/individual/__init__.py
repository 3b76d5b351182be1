r"""A privacy account for every example of a DP-SGD run (Yu et al. 2022 and 2023).

The worst case charges every example for a gradient as long as the clip norm C. An example whose
gradients have length :math:`c < C` is hidden by the same noise as if the noise multiplier were
:math:`\sigma C / c`: that is its own cost. `IndividualAccountant` takes the norms as training goes
on and gives every example its epsilon.

Norms are rounded UP to the grid :math:`\{r, 2r, \dots, C\}`, so the account is a bound, and a
history is a row of counts: how many steps at which level. One table for the levels and one matrix
product give the epsilons of all examples, by RDP or by privacy loss distributions
(`accounting.histories`). Without rounding, both are still cheap, and still bounds. RDP at each
order is convex in :math:`x = (c/C)^2`, so a chord between two nodes of a table lies above it, and a
norm adds two weights to its example's row. Loss distributions take up to 2,048 distinct norms as
they are, each as a mixture of two nodes (`accounting.levels`); where there are more, norms are
rounded up to a grid of as many, less than 0.001 C apart; of more than half a million examples to a
coarser one.

What the number is: an account along the realised trajectory ("output-specific", theorem 3.1 of Yu
et al. 2023). It is exact along it where gradients are clipped to the recorded norms, an estimate
where these are merely observed. It becomes a guarantee of individual DP where the norms are bounded
beforehand, or a filter keeps their sum within a budget (`filters`). It concerns its owner;
publishing it takes noise (`release`).

Whom the neighbours of a run differ in is the plan's to say (`DPSGDPlan.relation`, "zero-out" or
"add-remove"); the numbers are the same for both. Accountant and clip norm are the plan's too, and
no account exceeds the uniform epsilon by the same accountant for as many steps: the account of one
who is charged C at each of them is that number.

By privacy loss distributions, the default, the epsilons of 60,000 examples with histories of their
own take about six seconds on a CPU, by RDP less than one; without rounding some twenty seconds, and
two by RDP. Equal histories are done once.

Memory, with rounding: 2 bytes for each example and level up to 32,767 steps (2 GB for ten million
examples at r = 0.01), 4 bytes beyond; without, by loss distributions, the same for each distinct
norm or level, of which there are so few that it is about as much at most. Without, by RDP: at most
200 MB of norms that wait to be added, and 8 bytes for each example and order (about 2 GB for a
million) once they were added. Epsilons are computed in blocks of examples, so that what comes on
top does not grow with n. Where those without rounding take too much, one accountant after another,
each for a part of the examples, gives the same by RDP. By loss distributions without rounding the
examples' norms share nodes, between which a bound may be a thousandth or two higher.

Norms that change for a few examples at a time are recorded for these alone, in time that does not
grow with n.

>>> accountant = IndividualAccountant(3, sample_rate=0.01, noise_multiplier=1.0, max_grad_norm=0.5)
>>> accountant.record([0.5, 0.2, 0.0], steps=1000)
>>> accountant.epsilon(1e-5)
tensor([1.8282, 0.4719, 0.0000], dtype=torch.float64)
"""

from dpcompanion.individual.accountant import IndividualAccountant

__all__ = ["IndividualAccountant"]
