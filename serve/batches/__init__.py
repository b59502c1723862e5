"""Files and batches: OpenAI's Batch API, on disk and resumable (docs/serving/batches.md).

1. `serve.batches.http.uploads` writes a file of requests, one JSON object per line; `store.BatchStore` registers it.
2. `input_file.read_input` checks the lines of a new batch; any invalid line fails the batch.
3. `runner.BatchRunner` gives the requests to the engine, as many at a time as `window.FeedWindow` allows, each through
   the same reading, validation and response building as a call over HTTP (`calls`).
4. Each outcome is committed once. Requests without an outcome when the server ends or crashes run after the next start.
5. `runner` writes the outcomes to the output file and the error file of the batch.
"""
