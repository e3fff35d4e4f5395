/* Call cuLaunchKernel `count` times, as a C program would: what every other way of launching is held to. */
typedef int (*LaunchKernel)(void *, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, void *,
                            void **, void **);

int launch_loop(LaunchKernel launch, void *function, void *stream, void **parameters, int count)
{
    int error = 0;
    for (int i = 0; i < count && !error; i++) {
        error = launch(function, 1, 1, 1, 32, 1, 1, 0, stream, parameters, 0);
    }
    return error;
}
