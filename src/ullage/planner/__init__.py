"""The strategy that fits and runs fastest: every free key of a job tried, most of them by a bound that proves them slower or too large."""
