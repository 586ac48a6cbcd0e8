"""What runners write without being asked, as a benchmark reads it."""

from pathlib import Path

from shoal.runtime.protocol.recording import BoundPhase, append_phase, phases_file, read_phases

ENGINE = 3
PHASES = [BoundPhase(5, 1.0, 2.5, 2.75), BoundPhase(8, None, None, None)]


def test_phases_are_read_in_the_order_in_which_they_were_written(tmp_path: Path) -> None:
    assert read_phases(tmp_path, ENGINE) == []
    for count, phase in enumerate(PHASES, 1):
        append_phase(phases_file(tmp_path, ENGINE), phase)
        assert read_phases(tmp_path, ENGINE) == PHASES[:count]
    assert read_phases(tmp_path, ENGINE + 1) == []


def test_a_phase_that_is_being_written_is_not_there_yet(tmp_path: Path) -> None:
    path = phases_file(tmp_path, ENGINE)
    for phase in PHASES:
        append_phase(path, phase)
    content = path.read_bytes()
    second = content.index(b"\n") + 1
    for end in range(second, len(content)):
        path.write_bytes(content[:end])
        assert read_phases(tmp_path, ENGINE) == PHASES[:1]
