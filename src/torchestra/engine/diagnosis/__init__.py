"""The diagnosis of a hang: facts about every rank, and the rules that find the cause in them."""
