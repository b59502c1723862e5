"""Files and batches: OpenAI's Batch API, on disk and resumable (docs/serving/batches.md).

1. `serve.batches.http.uploads` writes an uploaded file of requests, one JSON object per line; `store.BatchStore`
   registers it.
2. `input_file.read_input` checks the lines of a new batch; any invalid line fails the batch.
3. `feeder.BatchFeeder` submits the requests to the engine, as many at a time as `window.FeedWindow` allows. Each is
   read, validated and answered like a call over HTTP (`calls`).
4. Each outcome is committed once. If the server stops or crashes, requests without an outcome run after the next start.
5. `runner.BatchRunner`, which takes a batch through these steps, writes the outcomes to its output and error files.
"""
