"""Training of recommendation models: ``train(TrainConfig(model="wukong", steps=500))``.

The loop is ``loop.train``, one step of it ``trainer.Trainer.step``; both read top to bottom.
"""
