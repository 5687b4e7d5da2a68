"""The words of `benchmarks/README.md` that no measurement changes."""

HEAD = """\
# Side by side

What a private training step costs, next to the same step without privacy and next to other libraries. This page is written by
`python -m benchmarks report` from the files in `results/`; only the regions between the markers at its end are written by hand.

## How to run it

    make bench                                     # makes .venv-bench, races everybody (leave it an hour), writes this page
    make bench ARGS=--quick                        # batch 128 alone, few rounds
    .venv-bench/bin/python -m benchmarks run --only cifar-cnn --batch 128 --contestants plain-nhwc tacit opacus-ghost
    .venv-bench/bin/python -m benchmarks run --resume     # go on where it was interrupted
    .venv-bench/bin/python -m benchmarks report
    .venv-bench/bin/python -m benchmarks profile   # where the time of one step goes
    .venv-bench/bin/python -m benchmarks ways      # for each layer, the way that is chosen and the way that is faster
    .venv-bench/bin/python -m benchmarks chance    # what sampling, the ledger and noise cost
    .venv-bench/bin/python -m benchmarks whole     # what of a whole training run is not steps

## How it is measured

- A step is forward, cross-entropy, backward, clipping at 1, noise of multiplier 1, and SGD with momentum, on a batch
  that lies in memory. tacit's step includes its ledger (in memory) and noise from the operating system's
  cryptographic randomness; the others use their usual, not cryptographic, noise.
- Everybody has a process of its own and takes turns: in each round each makes one step that is not counted and then steps
  for at least 0.15 s, while all others sleep on their pipes; each round begins with another one. A turn during which
  other processes had a tenth of the processor is repeated when they are quiet (at most twice), and the quietest counts.
- A ratio is taken within a round, to the fastest of the non-private contestants; shown are the median over the rounds
  and, in brackets, the quartiles.
- Before the race, every private contestant's clipped sum of 16 examples is compared with
  `tacit.gradients.reference.clipped_sum`, with a bound that clips half of them. Beyond a relative error of 1e-3 it is
  marked as different.
- Libraries that take both layouts of images try both, and race with the faster one that gives the right sum (on
  WRN-16-4, in the layout that suited ResNet-20). Everybody races at batch 128; at the other sizes only some, unless
  `--full` is given.
  Non-private training beyond batch 512 also tries gradient accumulation in pieces of 512, since tacit works in
  pieces, too. Whoever needs more than 6 GiB works in micro-batches if it can, which the column *set-up* says: Opacus
  as its `BatchMemoryManager` does it, opake and JAX Privacy by their own `microbatch_size`.
- tacit tells the C library to keep freed memory for the next step (`tacit.gradients.kernels.keep_memory`), since to get it
  again from the operating system, cleared, takes up to a fifth of a small step. So that nothing is gained by that
  alone, non-private training in channels last takes part with and without it.
- Peak memory is the highest resident size during the first three steps, less what was resident when model and inputs
  were made. The first step, which compiles (torch.compile, JAX) or probes (tacit), is shown apart.
- JAX runs the same networks, translated operation by operation (`contestants/jax_translation.py`), NHWC, as one
  jitted function that reuses its buffers. JAX Privacy's noise is part of it.
- Opacus has no rule for `WeightStandardizedConv2d`; it is given one (its own rule for convolutions and the chain
  rule), used by the modes hooks and ghost. For ghost clipping, indices of embeddings are made contiguous, without
  which it fails.
- fastDP is not on PyPI (`pip install fastDP` finds nothing) and this machine reaches no GitHub, so it was not
  measured. Where somebody has installed it, it takes part.
- An epoch is each library's own loop: `PrivateTrainer.fit`; `PrivacyEngine.make_private` with a `DataLoader`; opake's
  `PoissonSampler` with a `DataLoader`; JAX Privacy's `CyclicPoissonSampling`, padded to multiples of 32; shuffled
  index batches for non-private training. The first epoch is not timed.
"""

PROFILE = """\
## Where the time goes

<!-- profile -->{}<!-- /profile -->"""

WAYS = """\
## Two ways to clip a layer

<!-- ways -->{}<!-- /ways -->"""

CHANCE = """\
## What chance costs

<!-- chance -->{}<!-- /chance -->"""

WHOLE = """\
## A whole run

<!-- whole -->{}<!-- /whole -->"""

NOTES = """\
## Notes

<!-- notes -->{}<!-- /notes -->"""
