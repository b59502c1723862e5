"""A mixed-integer linear program that is built row by row and solved by HiGHS."""

import numpy as np


class LinearProgram:
    """A mixed-integer linear program, built column by column and row by row."""

    def __init__(self) -> None:
        self.cost: list[float] = []
        self.lower: list[float] = []
        self.upper: list[float] = []
        self.integer: list[bool] = []
        self.rows: list[dict[int, float]] = []
        self.row_lower: list[float] = []
        self.row_upper: list[float] = []

    def column(self, upper: float, *, integer: bool, cost: float = 0.0) -> int:
        self.cost.append(cost)
        self.lower.append(0.0)
        self.upper.append(upper)
        self.integer.append(integer)
        return len(self.cost) - 1

    def at_most(self, terms: dict[int, float], upper: float) -> None:
        self._row(terms, -np.inf, upper)

    def equal(self, terms: dict[int, float], value: float) -> None:
        self._row(terms, value, value)

    def _row(self, terms: dict[int, float], lower: float, upper: float) -> None:
        if terms:
            self.rows.append(terms)
            self.row_lower.append(lower)
            self.row_upper.append(upper)

    def solve(self, time_limit_s: float | None):
        try:
            import scipy.optimize
            import scipy.sparse
        except ImportError as error:
            raise ImportError("solve_optimal needs SciPy: pip install scipy") from error

        data = [v for row in self.rows for v in row.values()]
        columns = [c for row in self.rows for c in row]
        starts = np.concatenate([[0], np.cumsum([len(row) for row in self.rows])])
        matrix = scipy.sparse.csr_array((data, columns, starts), shape=(len(self.rows), len(self.cost)))
        options: dict[str, float] = {"mip_rel_gap": 0.0}
        if time_limit_s is not None:
            options["time_limit"] = time_limit_s
        return scipy.optimize.milp(
            np.array(self.cost),
            integrality=np.array(self.integer, int),
            bounds=scipy.optimize.Bounds(np.array(self.lower), np.array(self.upper)),  # pyright: ignore[reportArgumentType] - stub: float only
            constraints=scipy.optimize.LinearConstraint(
                matrix,
                np.array(self.row_lower),  # pyright: ignore[reportArgumentType] - stub: float only
                np.array(self.row_upper),  # pyright: ignore[reportArgumentType] - stub: float only
            ),
            options=options,
        )
