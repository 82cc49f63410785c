"""Arrange the tokens of an attempt's calls as a tree of nodes, each with only its own tokens.

A node is a piece of a prompt, or the tokens that the policy sampled in one call; its context is the path that leads to
it. Calls whose prompts begin alike share the nodes of that beginning, to the last id. So a conversation of n turns is
kept once and not n times, a branch begins where the prompts differ, and a rewritten context is a separate branch. A
response is always a separate node, also beside one with the same ids, because each was sampled. The leaves are the ends
of the trajectories.

The module knows ids, never text.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from leyden.types import Trajectory, Triplet
from leyden.types.tokens import common_prefix


@dataclass(slots=True, eq=False)
class TokenNode:
    """Some tokens, in the context of all nodes above. N tokens; the lists of tokens have shape (N,)."""

    parent: TokenNode | None
    """The node above; None for the root."""
    token_ids: list[int]
    loss_mask: list[int]
    """1 where the policy sampled the token."""
    logprobs: list[float]
    """Log-probabilities of sampled tokens; 0.0 where the mask is 0."""
    call: int | None = None
    """The number of the call that sampled it; None for a piece of a prompt."""
    children: list[TokenNode] = field(default_factory=list["TokenNode"])
    """Children in the order in which they were added. The first one continues the trajectory, the others branch off."""

    def split(self, length: int) -> TokenNode:
        """Cut the node after `length` tokens, 0 < length < N. Return the new node above, which holds these tokens."""
        assert self.parent is not None, "the root has no tokens"
        upper = TokenNode(
            self.parent, self.token_ids[:length], self.loss_mask[:length], self.logprobs[:length], self.call, [self]
        )
        self.parent.children[self.parent.children.index(self)] = upper
        self.parent = upper
        self.token_ids, self.loss_mask = self.token_ids[length:], self.loss_mask[length:]
        self.logprobs = self.logprobs[length:]
        return upper


class TokenGraph:
    """A tree of tokens to which calls are added one by one. It finds how much of each prompt is known already.

    A call's metadata may name the earlier call that its prompt continues: `goes_on_from` is the `span_id` of that call,
    and `known_prefix` is how many ids both have in common. Those ids are compared, and the search for the rest of the
    prompt starts there. Without such a pair, or with a wrong one, the whole prompt is searched from the root. The
    resulting tree is the same.
    """

    def __init__(self) -> None:
        self.root = TokenNode(None, [], [], [])
        """A node without tokens. Its children begin the sequences."""
        self._calls: list[Triplet] = []
        self._ends: dict[str, tuple[TokenNode, Triplet]] = {}
        """Each call by its span id, with the node that ends its response. A split leaves this node at the end."""
        self._is_ambiguous = False
        """Whether equal ids may lie on several paths, because a response begins with the same token as another child of
        its parent."""

    def add(self, call: Triplet) -> int:
        """Add a call that can be trained on (`refusal` is None). Return how many of its prompt's first tokens were in
        the tree already.

        Comparing a known token costs about 15 ns. The other tokens become new nodes.
        """
        prompt_ids, response = call.prompt.token_ids, call.response
        node, n_known, n_in_node = self._longest(prompt_ids, *self._search_start(call))
        if 0 < n_in_node < len(node.token_ids):
            node = node.split(n_in_node)
        if new := prompt_ids[n_known:]:
            node = _below(node, TokenNode(node, new, [0] * len(new), [0.0] * len(new)))
        mask = response.loss_mask or [1] * len(response.token_ids)
        logprobs = [p if sampled else 0.0 for p, sampled in zip(response.logprobs or [], mask, strict=True)]
        first = response.token_ids[0]
        self._is_ambiguous = self._is_ambiguous or any(child.token_ids[0] == first for child in node.children)
        sampled = _below(node, TokenNode(node, response.token_ids, mask, logprobs, len(self._calls)))
        self._calls.append(call)
        if isinstance(span_id := call.metadata.get("span_id"), str):
            self._ends[span_id] = sampled, call
        return n_known

    def known(self, prompt_ids: Sequence[int]) -> int:
        """Return how many of a prompt's first tokens are in the tree, and so perhaps in an engine's prefix cache."""
        return self._longest(list(prompt_ids), self.root, 0)[1]

    def nodes(self) -> list[TokenNode]:
        """Return all nodes that hold tokens, parents before children."""
        found: list[TokenNode] = []
        waiting = list(reversed(self.root.children))
        while waiting:
            node = waiting.pop()
            found.append(node)
            waiting.extend(reversed(node.children))
        return found

    def trajectories(self, *, reward: float | None = None) -> list[Trajectory]:
        """Return one trajectory for each leaf, in the order in which their first trained calls were added.

        reward: the attempt's final reward, for each trajectory.
        A path without a token to train on (all its calls were replayed) is no trajectory. Tokens that several leaves
        share are trained on once, in the trajectory that continued them first, and are context in the others.
        """
        leaves = [node for node in self.nodes() if not node.children]
        found = [pair for leaf in leaves if (pair := self._trajectory(leaf, reward)) is not None]
        return [trajectory for _, trajectory in sorted(found, key=lambda pair: pair[0])]

    def _trajectory(self, leaf: TokenNode, reward: float | None) -> tuple[int, Trajectory] | None:
        """Return the path to a leaf as a trajectory, and its first trained call's number; None without one."""
        # A node is ours, and trained on here, if each node below it on the path is a first child.
        path: list[tuple[TokenNode, bool]] = []
        node, is_ours = leaf, True
        while node.parent is not None:
            path.append((node, is_ours))
            is_ours = is_ours and node.parent.children[0] is node
            node = node.parent
        trajectory = Trajectory(token_ids=[], loss_mask=[], logprobs=[], reward=reward)
        calls: list[int] = []
        for node, is_ours in reversed(path):
            start = len(trajectory.token_ids)
            trajectory.token_ids += node.token_ids
            trajectory.loss_mask += node.loss_mask if is_ours else [0] * len(node.token_ids)
            trajectory.logprobs += node.logprobs if is_ours else [0.0] * len(node.token_ids)
            if is_ours and node.call is not None:
                self._add_call(trajectory, calls, node.call, start)
        return (calls[0], trajectory) if calls else None

    def _add_call(self, trajectory: Trajectory, calls: list[int], number: int, start: int) -> None:
        """Add the call `number` to `calls`, and to a trajectory whose ids from `start` on are its response."""
        end = len(trajectory.token_ids)
        call = self._calls[number]
        if call.response.loss_mask is not None and not any(call.response.loss_mask):
            return  # a replayed call, which is context
        if calls and calls[-1] == number:  # the second half of a response that was split
            trajectory.call_spans[-1] = (trajectory.call_spans[-1][0], end)
            return
        calls.append(number)
        trajectory.call_spans.append((start, end))
        trajectory.call_rewards.append(call.reward)
        trajectory.call_numbers.append(number)
        if versions := call.response.policy_versions:
            low, high = trajectory.policy_versions or (versions[0], versions[0])
            trajectory.policy_versions = (min(low, *versions), max(high, *versions))

    def _search_start(self, call: Triplet) -> tuple[TokenNode, int]:
        """Return the node from which to search a call's prompt, and how many ids lead to its end.

        It is the last node that lies completely within `known_prefix` of the call that the metadata names. It is the
        root if the metadata is missing or wrong, or if `_longest` might prefer equal ids on another path.
        """
        from_root = self.root, 0
        span_id, length = call.metadata.get("goes_on_from"), call.metadata.get("known_prefix")
        if (
            self._is_ambiguous
            or not isinstance(span_id, str)
            or not isinstance(length, int)
            or span_id not in self._ends
        ):
            return from_root
        node, earlier = self._ends[span_id]
        ids, prompt_ids, response_ids = call.prompt.token_ids, earlier.prompt.token_ids, earlier.response.token_ids
        if not 0 < length <= min(len(ids), len(prompt_ids) + len(response_ids)):
            return from_root
        in_prompt = min(length, len(prompt_ids))
        if ids[:in_prompt] != prompt_ids[:in_prompt] or ids[in_prompt:length] != response_ids[: length - in_prompt]:
            return from_root
        depth = len(prompt_ids) + len(response_ids)
        while depth > length and node.parent is not None:
            depth -= len(node.token_ids)
            node = node.parent
        return node, depth

    def _longest(self, prompt_ids: list[int], start: TokenNode, start_depth: int) -> tuple[TokenNode, int, int]:
        """Return the longest beginning of a prompt that is in the tree: its last node, its length, and how many of its
        ids are in that node. The first `start_depth` ids are known at the end of `start`.

        If several are equally long, prefer one that ends with a leaf, then one that ends at the end of a node, then the
        one that was added last.
        """
        best, best_rank = (start, start_depth, len(start.token_ids)), (start_depth, True, False)
        waiting = [(start, start_depth)]
        while waiting:
            parent, depth = waiting.pop()
            if depth == len(prompt_ids):
                continue
            first = prompt_ids[depth]
            for child in parent.children:
                ids = child.token_ids
                if ids[0] != first:
                    continue
                is_whole = ids == prompt_ids[depth : depth + len(ids)]
                length = len(ids) if is_whole else common_prefix(ids, prompt_ids[depth : depth + len(ids)])
                rank = (depth + length, is_whole, is_whole and not child.children)
                if rank >= best_rank:
                    best, best_rank = (child, depth + length, length), rank
                if is_whole:
                    waiting.append((child, depth + length))
        return best


def _below(parent: TokenNode, node: TokenNode) -> TokenNode:
    parent.children.append(node)
    return node
