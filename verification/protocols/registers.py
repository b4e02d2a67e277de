"""The registers of a membership agreement alone: what a rank reads while another one writes them anew.

The product's is arena_registers.py. A proposer makes and voids epochs, so that it writes over a proposal that
others may be reading. (In a whole agreement it takes many steps of three ranks to come so far.)
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torchestra.engine import layout as at
from verification.memory import Known
from verification.protocols.agreement import name_of_word
from verification.protocols.product import Mutation, copies
from verification.protocols.words import SHARED_WORDS, ModelArena
from verification.protocols.world import Model, ProtocolWorld, Rules
from verification.violations import WrongResult

_MODULE = "membership.arena_registers"
_SURVIVORS = ((0, 1), (0,))


@dataclass(frozen=True)
class RegisterReads:
    """Rank 0 proposes epochs, of which it voids all but the last; rank 1 reads the ballot.

    Attributes:
        name: for reports.
        epochs: how many.
        reads: how often rank 1 reads.
        rules: for other events.
    """

    name: str
    epochs: int
    reads: int
    rules: Rules = field(default_factory=Rules)
    size: int = 2

    def make(self, mutation: Mutation | None = None) -> Callable[[Known], ProtocolWorld]:
        """Return the function that makes the first state."""
        registers = copies((_MODULE,), {_MODULE: {"shared_words": SHARED_WORDS}}, mutation)[_MODULE]
        arena = ModelArena(self.size)

        def propose() -> Any:
            own = registers.ArenaRegisters(arena, 0)
            for epoch in range(1, self.epochs + 1):
                if epoch > 1:
                    own.void(own.ballot())
                own.propose(own.ballot(), _survivors(epoch), _key(epoch))
            return ()

        def read() -> Any:
            own = registers.ArenaRegisters(arena, 1)
            return tuple(tuple(own.ballot()) for _ in range(self.reads))

        model = Model([propose, read], {}, self.check, {}, self.rules)
        return lambda known: ProtocolWorld(model, known)

    def name_of(self, address: int) -> str:
        """Return the name of a word."""
        return name_of_word(address, self.size)

    def check(self, world: ProtocolWorld) -> None:
        """Refuse a ballot that was never proposed, and one that is older than one read before."""
        before = 0
        for _, epoch, state, proposer, survivors, key in world.results[1] or ():
            if state != 0 and (proposer, survivors, key) != (0, _survivors(epoch), _key(epoch)):
                raise WrongResult(
                    f"rank 1 has read survivors {survivors} and key {key[:1]!r} of epoch {epoch}"
                )
            if epoch < before:
                raise WrongResult(f"rank 1 has read epoch {epoch} after epoch {before}")
            before = epoch


def _survivors(epoch: int) -> tuple[int, ...]:
    """Return those of an epoch, which the epoch two before it, in the same words, has not."""
    return _SURVIVORS[epoch // 2 % 2]


def _key(epoch: int) -> bytes:
    return bytes([epoch]) * at.PROPOSAL_KEY_BYTES
