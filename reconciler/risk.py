# SPDX-License-Identifier: Apache-2.0
"""What a feed's silence about one send is worth: how likely it was accepted although nothing was heard. Pure, total.

A *control* is a send whose first attempt got the provider's answer; it was accepted for certain, so whether and when
the feed spoke of it measures the feed. A *claim* is an ambiguous send. Ages and lags are seconds; a lag counts from the
claim to the storing of the first event that names the send by wire key, and is None while there is none.

**History** (`Curve`). Of N sends of a stratum that were accepted and have passed age a, K were not heard of within a:
`m_h = (K+1)/(N+2)`, the mean of the miss rate's posterior under a uniform prior. It is taken of controls, and of
ambiguous sends that were proved accepted later, since the node that timed out may be the one that lags; the larger
counts. Of fewer than MANY ambiguous ones the estimate leans on the controls': `(K + MANY*m_h)/(N + MANY)`, times
STRESS, so that nothing known means three times what controls say, and a few late ones count at once.

**Near the claim** (`Recent`). Of n controls k are not heard of yet, k_late were not heard of at the age at which
history misses LATE. `A(s, j, q) = s/(n+1) / ((1-s) Binom(j; n, q))` are the odds of a regime in which any miss rate is
as likely (the integral of Binom(j; n, q) over q is 1/(n+1)) against the healthy one. Two such regimes are told apart:

* *late*: odds `max(A(k_late, LATE), A(k, m_h))` with s = SICK; misses `(k+1)/(n+2)`, and where k = 0 that times
  `min(1, (L/a)^n)`, L the largest lag among the n: n+1 lags of unknown scale, the claim's the longest;
* *loss*: odds `A(k, m_h)` with s = LOSS; misses `(k+1)/(n+2)`, and time heals nothing. Without it six controls that
  were heard of by chance, in a feed that loses half, would speak for a healthy feed the sooner the quicker they came.
  A spell may begin or end at the claim, then only the controls of one side testify: where k = 0, n is the smaller side.

`m = stress * (m_h + late odds * its misses + loss odds * its misses) / (1 + both odds)`, at most 1.

**Bursts** (`Burst`). Where ambiguous sends crowd, no control speaks for them. See `Burst.excess`.

**Prior** (`Cause`). p0 is how likely an ambiguous send was accepted before anybody listened, and by Bayes
`risk = p0*m / (p0*m + 1 - p0)`.
"""
