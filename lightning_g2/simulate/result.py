"""What a simulation gives back."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn


@dataclass(frozen=True, eq=False)
class SimulationResult:
    """Loss and pushes of a simulation; lists have one entry a push, in the order of arrival, rejected pushes included.

    Attributes:
        loss: terminal loss: the mean over the evaluation batches under the final weights, the module in evaluation
            mode; NaN or Inf where training has diverged.
        staleness: versions applied between the read of the weights and the gradient's own application; for one that
            was not applied, up to its arrival.
        energy: friction as the gate reports it, 0 to 8/3.
        weight: weight as the gate reports it, 0 to 1; 0 for a rejected push.
        time: simulated time of arrival, in the units of the delays.
        rank: the pushing rank.
        rejected: whether the gate did not send it.
        late: whether it was dropped since its round had ended.
        version: version of the weights with its gradient in them, or at its arrival if they never had it.
        rounds: size of the synchronous rounds in force when it had arrived; 0 where nobody waits.
        weights: final weights by name; copies.
        model: the trained module, with the final weights; not the one that was given.
        waited: time that each rank has waited, for its round to end or at the gate's word, in the units of the delays.
        versions_held: largest number of versions whose weights were kept at one time.
    """

    loss: float
    staleness: list[int]
    energy: list[float]
    weight: list[float]
    time: list[float]
    rank: list[int]
    rejected: list[bool]
    late: list[bool]
    version: list[int]
    rounds: list[int]
    weights: dict[str, Tensor]
    model: nn.Module
    waited: list[float]
    versions_held: int
