"""Test job: print the paths from which the driver and a worker import mmray."""

import ray

import mmray


@ray.remote(num_cpus=0.1)
def where():
    import mmray

    return mmray.__file__


if __name__ == "__main__":
    ray.init()
    print("driver", mmray.__file__)
    print("worker", ray.get(where.remote()))
