r"""Constraints that a normalization puts on its output (Group Whitening, Table 1).

Every normalization of the family centers and whitens ``k`` rows over ``n`` columns: :math:`k (k + 3) / 2` independent
equations on ``k n`` numbers. Standardizing is whitening of ``k = 1`` row. For ``N`` feature maps of shape (C, H, W):

=====================  ==============  =============  ==================
normalization          rows ``k``      columns ``n``  number of matrices
=====================  ==============  =============  ==================
BN                     1               N H W          C
BW, groups of ``k``    ``k``           N H W          C / k
GN, ``g`` groups       1               C H W / g      N g
GW, ``g`` groups       g               C H W / g      N
=====================  ==============  =============  ==================

Source: Group Whitening, section 4, Table 1, and its supplement, section 4. The supplement once prints 2dm for GN; its
derivation and the table give 2gm.
"""

import math
from typing import NamedTuple

from gw_detectron.errors import ConfigError

#: fewer columns take more than half of the freedom of standardized output (the papers name no number)
_FEW_COLUMNS = 4


class Constraints(NamedTuple):
    r"""Constraints of one normalization on its output.

    Args:
        number: :math:`\zeta(\phi; X)`, the number of independent equations.
        variables: :math:`\chi(\hat X)`, the count of numbers in the output.
        rows: k, rows of each whitened matrix.
        columns: n, its columns.
    """

    number: int
    variables: int
    rows: int
    columns: int

    @property
    def ratio(self) -> float:
        r"""Constraints per variable, :math:`\zeta / \chi`.

        Above 1 no such output exists.
        """
        return self.number / self.variables

    @property
    def feasible(self) -> bool:
        r"""Whether :math:`\zeta \le \chi` (Eq. 12)."""
        return self.number <= self.variables

    @property
    def stable(self) -> bool:
        """Whether there are enough columns in practice.

        Enough are as many as rows (section 4.1), and at least 4.
        """
        return self.feasible and self.columns >= max(self.rows, _FEW_COLUMNS)

    @property
    def remark(self) -> str:
        """Sentence about the problem; empty if there is none."""
        if self.stable:
            return ""
        state = "near-infeasible" if self.feasible else "infeasible"
        task = "standardizing" if self.rows == 1 else f"whitening {self.rows} rows"
        return (
            f"{state}: {task} over {self.columns} columns puts {self.number} constraints on {self.variables} numbers; "
            f"it is possible from {min_columns(self.rows)} columns on and stable from {max(self.rows, _FEW_COLUMNS)} on"
        )


def batch_constraints(d: int, m: int, width: int = 1) -> Constraints:
    r"""Count the constraints of normalization of d channels over m samples (for feature maps, images times pixels).

    This is BN for ``width`` 1, BW for ``width`` d, else BW in groups of ``width`` channels, the last one maybe smaller.

    .. math:: \zeta(\phi_{BN}; X) = 2 d, \qquad \zeta(\phi_{BW}; X) = d (d + 3) / 2

    Source: Group Whitening, Table 1; supplement, Eqs. 7-8.
    """
    width = min(width, d)
    number = d // width * _equations(width) + _equations(d % width)
    return Constraints(number, m * d, width, m)


def group_constraints(d: int, m: int, groups: int, whiten: bool) -> Constraints:
    r"""Count the constraints of normalization of m samples of d neurons (channels times pixels) over groups.

    This is GW if ``whiten``, else GN.

    .. math:: \zeta(\phi_{GN}; X) = 2 g m, \qquad \zeta(\phi_{GW}; X) = m g (g + 3) / 2

    Raises:
        ConfigError: g does not divide d.

    Source: Group Whitening, Table 1; supplement, Eqs. 10, 14-15.
    """
    if d % groups:
        raise ConfigError(
            f"groups ({groups}): does not divide {d} neurons. Fix: give a divisor of {d}."
        )
    number = m * (_equations(groups) if whiten else groups * _equations(1))
    return Constraints(number, m * d, groups if whiten else 1, d // groups)


def min_columns(rows: int) -> int:
    """Return the fewest columns over which rows can be whitened, the ceiling of (rows + 3) / 2 (Table 1)."""
    return -(-(rows + 3) // 2)


def max_groups(d: int, whiten: bool) -> int:
    r"""Return the most groups for d: :math:`d / 2` for GN, :math:`(\sqrt{8 d + 9} - 3) / 2` for GW (Table 1)."""
    return (math.isqrt(8 * d + 9) - 3) // 2 if whiten else d // 2


def _equations(rows: int) -> int:
    return rows * (rows + 3) // 2
