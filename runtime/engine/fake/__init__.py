"""An engine without a model, which is shipped: the whole protocol at made-up speed."""
