def body(kw):
    from tests.parity import Layout, fitted
    import tests.models as m

    t, _ = fitted(Layout(**kw), m.TinyGPT, batches=1, epochs=1, limit_val_batches=0)
    return t.strategy.plan.findings.slices
