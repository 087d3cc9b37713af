"""HiGHS, the solver of integer programs, without a word on standard output."""

from __future__ import annotations

import highspy


class QuietHighs(highspy.Highs):
    """HiGHS without the banner that its constructor prints when it sets its callbacks up."""

    def enableCallbacks(self) -> None:
        self.setOptionValue("output_flag", False)
        super().enableCallbacks()
