r"""Audits in one run: lower bounds on epsilon from a single training, for all and for each group.

Among the examples, m are canaries. A fair coin for each decides whether it takes part. The training
runs once; an auditor scores every canary, calls the r/2 with the largest scores in and the r/2 with
the smallest out, and says nothing of the rest (Steinke, Nasr and Jagielski 2023). Of a private
training few guesses can be right: the more are, the larger epsilon must be.

**For any (epsilon, delta)** (their theorem 5.2 and appendix D).  With V right guesses among r,

.. math::
    P(V \ge v) \le \beta + 2 m \delta \max_{1 \le i \le v} \frac{P(v > W \ge v - i)}{i}, \quad
    W \sim \mathrm{Bin}\big(r, 1 / (1 + e^{-\varepsilon})\big), \quad \beta = P(W \ge v).

`one_run_epsilon` is the largest epsilon at which that probability is below 1 - confidence. It needs
no assumption, and is far from tight: it allows for mechanisms that give away everything or nothing.

**For a whole trade-off curve** (Mahloujifar, Melis and Chaudhuri 2024). Let every pair of
neighbours satisfy P(E | in) <= F(P(E | out)) and the reverse, with F increasing and concave. Fix
canary j and the other coins. For each answer of the auditor let E be the outputs that give j this
answer and i - 1 right answers to the others, for any i of a set T. Averaged over answers and coins,
Jensen's inequality gives

.. math::
    P(j \text{ right}, V \in T) \le F\big(P(j \text{ wrong}, V + 1 \in T)\big),

and averaged over j, with p_i = P(V = i) and T = {t, ..., r},

.. math::
    \frac1m \sum_{i \ge t} i\, p_i \le F\Big(\frac1m \sum_{i \ge t} (r - i + 1)\, p_{i - 1}\Big).

If P(V >= v) were as large as 1 - confidence, these inequalities would bound P(V >= t) from below
for t = v - 1, v - 2, ... in turn; where a bound exceeds 1, F is refuted.  F may be that of a
Gaussian with shift mu (`one_run_mu`), or what a plan claims (`PlanCurve`), at all its pairs of
epsilon and delta together.

A bound below a claim proves nothing. One above it refutes the claim: the account, the code or an
assumption is wrong. **Which faults it finds** depends on the canaries. With gradients at right
angles and five times the clip norm, as the tests have them, `audit_training` finds in one run:

=====================================  ==================
fault of the trainer                   found
=====================================  ==================
no noise                               with 500 canaries
every example in each step             with 500
two draws joined into one              with 500
no clipping                            with 500
half the noise                         with 2,000
a tenth less noise, a tenth more rate  no: too small
low bits that floats give away         no: not looked at
a seed that can be guessed             no: not looked at
batch sizes or losses that are given   no: not looked at
=====================================  ==================
"""

from dpcompanion.audit.bounds import (
    GaussianCurve,
    PlanCurve,
    audit,
    audit_scores,
    one_run_epsilon,
    one_run_mu,
    random_inclusion,
    refutes,
)
from dpcompanion.audit.trained import audit_training, make_canaries

__all__ = [
    "PlanCurve",
    "audit",
    "audit_training",
    "random_inclusion",
    "make_canaries",
    "audit_scores",
]
