from shoal.server.batch.sending_window import LEAST, SendingWindow


def looked(window: SendingWindow, *running: int | None) -> list[int]:
    sizes = []
    for count in running:
        window.see(count)
        sizes.append(window.lines)
    return sizes


def test_the_window_is_twice_what_the_node_runs() -> None:
    window = SendingWindow(2048)
    assert window.lines == LEAST
    assert looked(window, 16, 32, 64, 64) == [32, 64, 128, 128]
    assert looked(window, 10, 0) == [26, 16]


def test_few_lines_wait_even_if_much_runs() -> None:
    window = SendingWindow(100)
    looked(window, *[1000] * 10)
    assert window.lines == 1100


def test_a_node_that_refuses_lines_gets_fewer() -> None:
    window = SendingWindow(2048)
    looked(window, *[100] * 5)
    assert window.lines == 200
    for smaller in (100, 50, 25):
        window.refused()
        assert looked(window, 100) == [smaller]
    assert looked(window, None, None) == [12, 6]
    assert looked(window, 100, 100) == [12, 24]
