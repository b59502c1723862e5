"""Files and batches: OpenAI's Batch API, on disk and resumable (docs/serving/batches.md).

1. `serve.batches.http.uploads` writes a file of requests, one JSON object a line; `store.BatchStore` registers it.
2. `input_file.read_input` checks the lines of a new batch; what is wrong with them fails it.
3. `runner.BatchRunner` gives the requests to the engine, as many at a time as `window.FeedWindow` allows, each through
   the same reading, validation and response building as a call over HTTP (`calls`).
4. Each outcome is committed once; what has none when the server ends, however it ends, runs after the next start.
5. `runner` has the outcomes written as the output file and the error file of the batch.
"""
