r"""How many constraints a normalisation puts on its output, and whether they leave it any freedom.

Every normalisation of the family centres and whitens ``k`` rows over ``n`` columns, which are :math:`k (k + 3) / 2`
independent equations on ``k n`` numbers; standardising is whitening of ``k = 1`` row. For ``N`` feature maps of
shape (C, H, W):

=====================  ==============  ============  ==================
normalisation          rows ``k``      columns ``n``  such matrices
=====================  ==============  ============  ==================
BN                     1               N H W         C
BW, groups of ``k``    ``k``           N H W         C / k
GN, ``g`` groups       1               C H W / g     N g
GW, ``g`` groups       g               C H W / g     N
=====================  ==============  ============  ==================

Source: Group Whitening, section 4, Table 1, and its supplement, section 4. The supplement prints the constraint number
of GN as 2dm once; 2gm, of the table, is what its derivation gives.
"""

import math
from typing import NamedTuple

#: columns below which standardising takes more than half of the freedom of its output (the papers name no number)
_FEW_COLUMNS = 4


class Constraints(NamedTuple):
    r"""The constraints of one normalisation on its output.

    Args:
        number: :math:`\zeta(\phi; X)`, the number of independent equations.
        variables: :math:`\chi(\hat X)`, the numbers in the output.
        side: k, rows of the matrix that is whitened at a time.
        columns: n, columns of it.
    """

    number: int
    variables: int
    side: int
    columns: int

    @property
    def ratio(self) -> float:
        r""":math:`\zeta / \chi`, the part of the output's freedom that is taken; above 1 there is no such output."""
        return self.number / self.variables

    @property
    def feasible(self) -> bool:
        r"""Whether :math:`\zeta \le \chi` (Eq. 12)."""
        return self.number <= self.variables

    @property
    def stable(self) -> bool:
        """Whether there are enough columns in practice: as many as rows (section 4.1), and at least 4."""
        return self.feasible and self.columns >= max(self.side, _FEW_COLUMNS)

    @property
    def remark(self) -> str:
        """A sentence on what is wrong, empty if all is well."""
        if self.stable:
            return ""
        what = "standardising" if self.side == 1 else f"whitening {self.side} rows"
        enough = max(self.side, _FEW_COLUMNS)
        needs = f"needs {least_columns(self.side)} columns to be possible and {enough} to be stable"
        state = "near-infeasible" if self.feasible else "infeasible"
        return (
            f"{state}: {what} over {self.columns} columns {needs}; it puts {self.number} constraints on "
            f"{self.variables} numbers"
        )


def batch_constraints(d: int, m: int, width: int = 1) -> Constraints:
    r"""The constraints of normalisation over a batch: BN for ``width`` 1, BW for ``width`` d, else group-based BW.

    .. math:: \zeta(\phi_{BN}; X) = 2 d, \qquad \zeta(\phi_{BW}; X) = d (d + 3) / 2

    Args:
        d: channels.
        m: samples; for feature maps the images times the pixels of each.
        width: channels that are whitened together; the last group may be smaller.

    Raises:
        ValueError: an argument is not positive.

    Source: Group Whitening, Table 1; supplement, Eqs. 7-8.
    """
    _check_positive(d=d, m=m, width=width)
    width = min(width, d)
    number = d // width * _equations(width) + _equations(d % width)
    return Constraints(number, m * d, width, m)


def group_constraints(d: int, m: int, groups: int, whiten: bool) -> Constraints:
    r"""The constraints of normalisation over the groups of a sample: GN, or GW if ``whiten``.

    .. math:: \zeta(\phi_{GN}; X) = 2 g m, \qquad \zeta(\phi_{GW}; X) = m g (g + 3) / 2

    Args:
        d: neurons of a sample; for feature maps the channels times the pixels.
        m: samples.
        groups: g; it divides d.
        whiten: decorrelate the groups as well.

    Raises:
        ValueError: an argument is not positive, or g does not divide d.

    Source: Group Whitening, Table 1; supplement, Eqs. 10, 14-15.
    """
    _check_positive(d=d, m=m, groups=groups)
    if d % groups:
        raise ValueError(f"groups={groups} does not divide {d} neurons")
    number = m * (_equations(groups) if whiten else groups * _equations(1))
    return Constraints(number, m * d, groups if whiten else 1, d // groups)


def least_columns(side: int) -> int:
    """The fewest columns over which ``side`` rows can be whitened: the ceiling of (side + 3) / 2; 2 for BN, GN.

    Source: Group Whitening, Table 1, the range of m for BN and BW.
    """
    return -(-(side + 3) // 2)


def most_groups(d: int, whiten: bool) -> int:
    r"""The most groups for d neurons: :math:`d / 2` for GN, :math:`(\sqrt{8 d + 9} - 3) / 2` for GW, rounded down.

    Source: Group Whitening, Table 1.
    """
    return (math.isqrt(8 * d + 9) - 3) // 2 if whiten else d // 2


def _equations(side: int) -> int:
    return side * (side + 3) // 2


def _check_positive(**values: int) -> None:
    for name, value in values.items():
        if not isinstance(value, int) or value < 1:
            raise ValueError(f"{name}={value!r} has to be a positive integer")
