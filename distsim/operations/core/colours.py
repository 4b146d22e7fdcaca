"""The colours of the operations, one for each way that data moves; they can be distinguished by
colour-blind readers.

Source: Okabe, Ito, "Color Universal Design" (2008), their palette of eight, and one grey.
"""

from __future__ import annotations

SEND = "#E69F00"  # orange
RECV = "#56B4E9"  # sky blue
REDUCE = "#0072B2"  # blue: contributions are combined
COLLECT = "#009E73"  # green: contributions come together side by side
SPREAD = "#CC79A7"  # purple: one rank gives to all
EXCHANGE = "#D55E00"  # vermilion: everybody to everybody
WAIT = "#F0E442"  # yellow: nothing moves, somebody waits
LOCAL = "#BBBBBB"  # grey: a rank's own work
END = "#000000"  # black: the rank leaves
