"""How many slots should be free ahead of the puts that will ask for them.

Owns the reserve's arithmetic and the measure of how fast puts come. Pure: the clock comes with each call. Must
not know which object leaves for it, nor where slots are.
"""

RESERVE_SHARE_MIN = 64  # free slots kept ahead: at least this part of the card…
RESERVE_SHARE_MAX = 8  # …and at most this part, however fast puts come
STREAM_MARGIN_SHARE = 2  # half more than a grace time's puts: commits and ticks take their time, and streams grow
PEAK_FADES_SHARE = 32  # stores come in bursts: after a pause, the next one finds its reserve, which shrinks slowly
DEMAND_SHARE_MAX = 2  # no two objects leave for one that is larger than this part (half) of the card

_PERIOD_NS_MIN = 1_000_000


class Pressure:
    """Evicted slots come free only after the grace, so a steady stream needs a grace time's puts in reserve."""

    def __init__(self, slots_total: int, grace_ns: int) -> None:
        self.now_ns = 0
        self._total = slots_total
        self._period_ns = max(grace_ns, _PERIOD_NS_MIN)
        self._since_ns = 0
        self._put_slots = 0  # in the present period
        self._peak_slots = 0  # of those before, the older the less
        self._demand_slots = 0  # what the largest refused put needs

    def advance(self, now_ns: int) -> None:
        """Time goes on."""
        self.now_ns = max(self.now_ns, now_ns)
        periods = (now_ns - self._since_ns) // self._period_ns
        if periods >= 1:
            peak = max(self._put_slots, self._peak_slots - -(-self._peak_slots // PEAK_FADES_SHARE))
            for _ in range(min(periods - 1, peak.bit_length() * PEAK_FADES_SHARE)):
                peak -= -(-peak // PEAK_FADES_SHARE)
            self._peak_slots, self._put_slots = peak, 0
            self._since_ns = now_ns

    def put(self, slots: int) -> None:
        """A put asked for `slots` slots."""
        self._put_slots += slots

    def refused(self, slots: int, *, one_in_the_way: bool) -> None:
        """It did not get them. One object alone makes way for another of any size: else the first would be the last."""
        if slots <= self._total // DEMAND_SHARE_MAX or (one_in_the_way and slots <= self._total):
            self._demand_slots = max(self._demand_slots, slots)

    def lacking_slots(self, *, free: int, on_their_way: int) -> int:
        """How many slots must still leave; 0 or less when enough are free or will be."""
        if free >= self._demand_slots:
            self._demand_slots = 0
        streaming = max(self._put_slots, self._peak_slots)
        streaming += -(-streaming // STREAM_MARGIN_SHARE)
        reserve = min(max(streaming, self._total // RESERVE_SHARE_MIN), self._total // RESERVE_SHARE_MAX)
        return max(reserve, self._demand_slots) - free - on_their_way
