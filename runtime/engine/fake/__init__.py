"""An engine without a model, part of the product: the whole protocol at made-up speed."""
