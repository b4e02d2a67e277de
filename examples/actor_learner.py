"""Reinforcement learning: observers play, one agent decides for them all and learns from what comes of it.

    python -m torchestra run --nproc 3 examples/actor_learner.py

The game is Catch: a ball falls through a small field, a paddle below moves left, right or not at all, and
what counts is whether it is there when the ball arrives. Each observer plays many games at once, on a worker
of its own, and asks the agent at every step what to do, by a remote reference to it. The agent answers when
all observers have asked, with one pass through its network: its method is an ``async_execution`` one, so
nobody's thread waits meanwhile. After each round the agent learns (REINFORCE: Williams, 1992). At the end it
must catch nearly every ball; without learning, it catches about one of six.
"""

from __future__ import annotations

import argparse
import sys
import threading
import time

import torch
from rich.console import Console
from torch import nn
from torch.futures import Future

from torchestra import rpc
from torchestra.rendezvous import launch_environment

WIDTH, HEIGHT = 7, 8
MOVES = torch.tensor([-1, 0, 1])
AGENT = "agent"


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Learn to catch a falling ball.")
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--games", type=int, default=32, help="that each observer plays at once")
    parser.add_argument("--lr", type=float, default=1e-2, help="learning rate")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--require-caught", type=float, default=0.95, help="fail if the last rounds give less"
    )
    return parser.parse_args()


class Catch:
    """Many games at once."""

    def __init__(self, games: int, dice: torch.Generator) -> None:
        self.ball = torch.randint(WIDTH, (games,), generator=dice)
        self.paddle = torch.randint(WIDTH, (games,), generator=dice)
        self.height = HEIGHT

    def look(self) -> torch.Tensor:
        """Return what a player sees of each game."""
        height = torch.full_like(self.ball, self.height)
        return torch.stack([self.ball - self.paddle, height], dim=1) / HEIGHT

    def step(self, moves: torch.Tensor) -> None:
        self.paddle = (self.paddle + moves).clamp(0, WIDTH - 1)
        self.height -= 1

    def caught(self) -> torch.Tensor:
        return (self.ball == self.paddle).float()


class Observer:
    """Plays on a worker of its own."""

    def __init__(self, number: int, games: int, seed: int) -> None:
        self.number = number
        self.games = games
        self.dice = torch.Generator().manual_seed(seed + number)

    def play(self, agent: rpc.RRef) -> torch.Tensor:
        """A round; which balls were caught."""
        game = Catch(self.games, self.dice)
        while game.height:
            game.step(agent.rpc_sync().decide(self.number, game.look()))
        return game.caught()


class Agent:
    """Decides for all observers, and learns."""

    def __init__(self, observers: int, lr: float) -> None:
        self.policy = nn.Sequential(nn.Linear(2, 64), nn.Tanh(), nn.Linear(64, len(MOVES)))
        self.optimizer = torch.optim.Adam(self.policy.parameters(), lr=lr)
        self.observers = observers
        self.asking = threading.Lock()
        self.asked: dict[int, torch.Tensor] = {}
        self.answer: Future[torch.Tensor] = Future()
        self.log_probabilities: list[torch.Tensor] = []

    @rpc.functions.async_execution
    def decide(self, observer: int, seen: torch.Tensor) -> Future[torch.Tensor]:
        """The moves in the games of one observer, when all observers have asked."""
        with self.asking:  # each call has a thread
            self.asked[observer] = seen
            answer, asked = self.answer, self.asked
            mine = answer.then(lambda moves: moves.value()[observer])
            if len(asked) < self.observers:
                return mine
            self.answer, self.asked = Future(), {}
        everybody = torch.stack([asked[number] for number in range(self.observers)])
        chosen = torch.distributions.Categorical(logits=self.policy(everybody))
        moves = chosen.sample()
        self.log_probabilities.append(chosen.log_prob(moves))
        answer.set_result(MOVES[moves])
        return mine

    def learn(self, caught: torch.Tensor) -> None:
        """Make what was done in games that ended well more likely, and the rest less."""
        advantage = (caught - caught.mean()) / (caught.std() + 1e-3)
        loss = -(torch.stack(self.log_probabilities).sum(dim=0) * advantage).mean()
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.log_probabilities.clear()


def train(settings: argparse.Namespace, observers: int, console: Console) -> float:
    """Rounds of playing and learning; the share of balls caught in the last tenth of them."""
    agent = rpc.RRef(Agent(observers, settings.lr))
    players = [
        rpc.remote(f"observer{number}", Observer, args=(number, settings.games, settings.seed))
        for number in range(observers)
    ]
    scores: list[float] = []
    shown = max(1, settings.rounds // 10)
    for done in range(1, settings.rounds + 1):
        rounds = [player.rpc_async().play(agent) for player in players]
        caught = torch.stack(torch.futures.wait_all(rounds))
        agent.local_value().learn(caught)
        scores.append(caught.mean().item())
        if done % shown == 0:
            console.print(f"round {done:4}/{settings.rounds}   caught {sum(scores[-shown:]) / shown:.1%}")
    return sum(scores[-shown:]) / shown


def main() -> int:
    settings = options()
    torch.set_num_threads(1)
    torch.manual_seed(settings.seed)
    launch = launch_environment()
    if launch.rank is None or launch.world_size is None or launch.world_size < 2:
        print("actor_learner: start with torchestra run --nproc 2 or more", file=sys.stderr)
        return 2
    observers = launch.world_size - 1
    rpc.init_rpc(AGENT if launch.rank == 0 else f"observer{launch.rank - 1}")
    score = None
    if launch.rank == 0:
        console = Console()
        started = time.perf_counter()
        score = train(settings, observers, console)
        seconds = time.perf_counter() - started
        games = settings.rounds * settings.games * observers
        console.print(
            f"{observers} observers, {games:,} games, {games * HEIGHT / seconds:,.0f} decisions/s: caught"
            f" {score:.1%} in the last tenth"
        )
    rpc.shutdown()
    if score is not None and score < settings.require_caught:
        print(f"actor_learner: {score:.1%} is below {settings.require_caught:.1%}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
