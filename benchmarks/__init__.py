"""What moving and applying gradients costs, beside yardsticks and peers measured in the same run.

`python -m benchmarks` runs it; README.md says what each figure means. Every process that takes part
is a real one, on loopback: servers are `python -m paramserver`, clients are told what to do over a
pipe (`child`).
"""
