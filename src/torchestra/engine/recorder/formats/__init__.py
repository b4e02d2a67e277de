"""The formats of other tools in which a flight record can be written."""
