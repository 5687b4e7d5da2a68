"""Hostile input: every parser of tacit is given bytes that nobody honest would write.

`targets` says what is tried, `mutation` how bytes are spoiled, `guard` what counts as a finding. Two drivers run them:
`test_targets.py`, for seconds and with fixed seeds, in the suite, and `python -m tests.fuzz`, for as long as one likes.
"""
