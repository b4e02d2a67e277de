"""Find out from a flight record what takes the time: pure functions over its rows, without any drawing."""
