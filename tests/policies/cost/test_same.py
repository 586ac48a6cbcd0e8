from shoal.policies.cost.same import Same


def test_what_stands_for_one_object_is_equal_to_nothing_else() -> None:
    one, like_it = [1], [1]
    assert Same(one) == Same(one)
    assert hash(Same(one)) == hash(Same(one))
    assert Same(one) != Same(like_it)
    assert Same(one) != one
