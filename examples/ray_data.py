"""Answer a dataset of pictures and questions with Ray Data: `ray_data.py FROM TO`, of Parquet.

Needs `pip install 'mmjax[ray]'`. Rows have a `picture`, a file's bytes, and a `prompt`.
"""

import sys

import ray
from ray.data import ActorPoolStrategy

from mmjax.deploy.ray_data import AnswerRows

if __name__ == "__main__":
    source, target = sys.argv[1:]
    # Actors take whole blocks, and Ray makes few of small files.
    asked = ray.data.read_parquet(source).repartition(target_num_rows_per_block=64)
    answered = asked.map_batches(
        AnswerRows,
        fn_constructor_kwargs={
            "image_column": "picture",
            "sampling_params": {"temperature": 0.0, "max_tokens": 16},
        },
        batch_size=64,
        compute=ActorPoolStrategy(size=2),
        # Of two cores, actors must leave one to what reads and writes. With GPUs: `num_gpus=1`.
        num_cpus=0.5,
    )
    answered.write_parquet(target)
