"""Privacy bugs made on purpose, one at a time, in a copy of tacit: does a test fail for each of them?"""
