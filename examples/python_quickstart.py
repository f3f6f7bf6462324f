"""Two runs trained as one cohort; the better one is published, used and proved."""

import inlay

backbone = inlay.load_backbone("minilm")
task = inlay.load_task("examples/sms_spam/sms_spam.tsv", name="sms", limit=400)  # or a DataFrame

runs = [inlay.make_run(task, backbone, lr=lr, epochs=2, batch_size=8) for lr in (1e-3, 3e-3)]
results = inlay.fit(runs, backbone)
run, result = max(zip(runs, results, strict=True), key=lambda pair: pair[1].dev_metric or 0)
version = inlay.publish(run, result, backbone)
print(version.reference, result.dev_metrics)

texts = ["Free entry! Call 09061701461 to claim your prize", "Home by eight. Shall I bring bread?"]
for answer in inlay.Engine(backbone).predict([inlay.Request("sms", text) for text in texts]):
    print(answer.version, answer.outcome.label, answer.outcome.probabilities)

print("all versions stand:", all(check.stands for check in inlay.verify(backbone)))
