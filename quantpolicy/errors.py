"""The one exception tree of the project.

    QuantPolicyError                exit 1
    ├── RuleTableError              exit 2   a families.yaml or an overlay is malformed
    ├── RequestError                exit 2   the request or the named model makes no sense
    │   └── DeniedError             exit 1   the request is sound, but a rule or the host refuses it
    ├── PlanMismatchError           exit 1   a plan does not fit the model it is applied to
    ├── StaleCheckpointError        exit 1   a checkpoint was baked under other rules
    ├── CorruptCheckpointError      exit 3   a checkpoint is damaged or not one of ours
    └── KernelMountError            exit 1   a fusion could not be mounted

Every message says where, what was found, what is allowed and one remedy; the same four values are
attributes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar

if TYPE_CHECKING:
    from quantpolicy.plan import Decision


class QuantPolicyError(Exception):
    """Base of all errors raised on purpose by quantpolicy and prequant.

    Args:
        where: the file and line, module, field or flag concerned.
        found: what was found there.
        allowed: what would have been accepted ("" when the remedy says it).
        remedy: one thing the reader can do about it.
    """

    exit_code: ClassVar[int] = 1

    def __init__(self, where: str, found: str, *, allowed: str = "", remedy: str = "") -> None:
        self.where = where
        self.found = found
        self.allowed = allowed
        self.remedy = remedy
        super().__init__(self._sentence())

    def _sentence(self) -> str:
        parts = [f"{self.where}: {self.found}"]
        if self.allowed:
            parts.append(self.allowed)
        if self.remedy:
            parts.append(self.remedy)
        return "; ".join(part.rstrip(".") for part in parts) + "."

    def to_dict(self) -> dict[str, object]:
        """Return the error as plain JSON values, for ``--json`` output."""
        return {
            "error": type(self).__name__,
            "where": self.where,
            "found": self.found,
            "allowed": self.allowed,
            "remedy": self.remedy,
            "exit_code": self.exit_code,
        }


class RuleTableError(QuantPolicyError):
    """A rule table (families.yaml or an overlay) is malformed.

    Args:
        others: further errors found in the same pass; the message names their places.
    """

    exit_code = 2

    def __init__(
        self,
        where: str,
        found: str,
        *,
        allowed: str = "",
        remedy: str = "",
        others: Sequence[RuleTableError] = (),
    ) -> None:
        self.others = tuple(others)
        super().__init__(where, found, allowed=allowed, remedy=remedy)

    def _sentence(self) -> str:
        sentence = super()._sentence()
        if not self.others:
            return sentence
        places = ", ".join(error.where for error in self.others[:8])
        more = f", and {len(self.others) - 8} more" if len(self.others) > 8 else ""
        return f"{sentence.removesuffix('.')} (also wrong: {places}{more})."

    def to_dict(self) -> dict[str, object]:
        """Return the error and the further ones as plain JSON values."""
        return {**super().to_dict(), "others": [error.to_dict() for error in self.others]}


class RequestError(QuantPolicyError):
    """The request, the host description or the model reference is unusable."""

    exit_code = 2


class DeniedError(RequestError):
    """A sound request that a rule, a capability or the memory budget refuses.

    Args:
        decisions: the whole trace of candidates, accepted and rejected.
        rule: id of the rule that refused, "" when a host fact did.
        evidence: ids of the evidence records behind that rule.
    """

    exit_code = 1

    def __init__(
        self,
        where: str,
        found: str,
        *,
        allowed: str = "",
        remedy: str = "",
        decisions: Sequence[Decision] = (),
        rule: str = "",
        evidence: Sequence[str] = (),
    ) -> None:
        self.decisions = tuple(decisions)
        self.rule = rule
        self.evidence = tuple(evidence)
        super().__init__(where, found, allowed=allowed, remedy=remedy)

    def to_dict(self) -> dict[str, object]:
        """Return the error, the rule and the whole trace as plain JSON values."""
        return {
            **super().to_dict(),
            "rule": self.rule,
            "evidence": list(self.evidence),
            "decisions": [decision.model_dump(mode="json") for decision in self.decisions],
        }


class Mismatch:
    """One difference between what was expected and what was found.

    Args:
        code: stable machine-readable name, such as ``layer_missing``.
        subject: the module, file or header field concerned.
        expected: what the plan or the header says.
        found: what is there.
    """

    __slots__ = ("code", "expected", "found", "subject")

    def __init__(self, code: str, subject: str, expected: str, found: str) -> None:
        self.code = code
        self.subject = subject
        self.expected = expected
        self.found = found

    def __str__(self) -> str:
        return f"[{self.code}] {self.subject}: expected {self.expected}, found {self.found}"

    def __repr__(self) -> str:
        return f"Mismatch({self.code!r}, {self.subject!r}, {self.expected!r}, {self.found!r})"

    def to_dict(self) -> dict[str, str]:
        """Return the mismatch as plain JSON values."""
        return {
            "code": self.code,
            "subject": self.subject,
            "expected": self.expected,
            "found": self.found,
        }


class _MismatchesError(QuantPolicyError):
    """Shared body of the errors that collect every mismatch before they raise."""

    def __init__(
        self, where: str, mismatches: Sequence[Mismatch], *, remedy: str, found: str = ""
    ) -> None:
        self.mismatches = tuple(mismatches)
        shown = "; ".join(str(mismatch) for mismatch in self.mismatches[:8])
        rest = len(self.mismatches) - 8
        if rest > 0:
            shown += f"; and {rest} more"
        super().__init__(where, found or shown, remedy=remedy)

    def to_dict(self) -> dict[str, object]:
        """Return the error and every mismatch as plain JSON values."""
        return {**super().to_dict(), "mismatches": [item.to_dict() for item in self.mismatches]}


class PlanMismatchError(_MismatchesError):
    """A plan does not fit the model it is applied to; the model was left as it was."""


class StaleCheckpointError(_MismatchesError):
    """A checkpoint was baked under rules, settings or a base that no longer hold."""


class CorruptCheckpointError(_MismatchesError):
    """A checkpoint is damaged, incomplete or not a baked one at all."""

    exit_code = 3


class KernelMountError(QuantPolicyError):
    """A fusion could not be mounted on every one of its sites; none was changed."""
