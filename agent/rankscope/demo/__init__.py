"""The demo: a real server, a real run with a real fault, and what Rankscope says about it.

`plan` draws the fault, `processes` starts and ends what a user could start by hand, `watch` looks
at the API for as long as something may still change, `result` compares verdict and truth.
"""
