package interop;

import com.google.gson.Gson;
import com.google.gson.JsonObject;
import com.sun.management.OperatingSystemMXBean;
import java.io.BufferedReader;
import java.io.IOException;
import java.io.InputStreamReader;
import java.io.PrintStream;
import java.lang.management.ManagementFactory;
import java.nio.charset.StandardCharsets;
import java.util.ArrayList;
import java.util.HashMap;
import java.util.HashSet;
import java.util.List;
import java.util.Map;
import java.util.Set;
import java.util.concurrent.CountDownLatch;
import java.util.concurrent.TimeUnit;
import java.util.concurrent.atomic.AtomicBoolean;
import java.util.function.Function;
import java.util.stream.Stream;

/**
 * Does a task that the benchmarks of redlatch measure, with a library in Java: what benchmarks/compare/worker.go does with
 * libraries in Go.
 */
abstract class Worker {
  private static final int SUB_BITS = 6; // see hist.go
  private static final int BUCKETS = (42 - SUB_BITS) << SUB_BITS;
  private static final long PATIENCE = TimeUnit.SECONDS.toNanos(2); // with those who wait when the time is over

  private static final Gson GSON = new Gson();
  private static final OperatingSystemMXBean PROCESS =
      (OperatingSystemMXBean) ManagementFactory.getOperatingSystemMXBean();

  final JsonObject task;
  /** Some threads still wait, and nothing else should be measured beside them. */
  private boolean spent;

  Worker(JsonObject task) {
    this.task = task;
  }

  /** An acquisition and a release by one thread. */
  interface Operation {
    void acquire() throws Exception;

    void release() throws Exception;
  }

  /** Returns the work of one thread on the object of that name. */
  abstract Operation operation(String name) throws Exception;

  /**
   * Reads a task as a line, warms up, prints "ready", begins with the next line, prints what has come of it, and goes on
   * with the next task unless it says that it is spent.
   */
  static void serve(Function<JsonObject, Worker> open) throws IOException {
    PrintStream out = new PrintStream(System.out, true, StandardCharsets.UTF_8);
    System.setOut(System.err);
    BufferedReader in = new BufferedReader(new InputStreamReader(System.in, StandardCharsets.UTF_8));
    // The compiler of the virtual machine wants more of a warm-up than the time of a measurement: above all at first, and
    // again for each kind of object, and when there is contention.
    Set<List<String>> warm = new HashSet<>();
    boolean spent = false;
    for (String line = in.readLine(); line != null && !spent; line = in.readLine()) {
      Worker worker = open.apply(GSON.fromJson(line, JsonObject.class));
      String name = worker.task.get("name").getAsString();
      boolean first = warm.isEmpty();
      boolean known = !warm.add(Stream.of("do", "kind", "own").map(of -> worker.task.get(of).getAsString()).toList());
      long nanos = worker.nanos("for");
      long enough = TimeUnit.SECONDS.toNanos(first ? 10 : 5);
      long warmUp = known ? TimeUnit.SECONDS.toNanos(1) : Math.max(nanos, enough);
      try {
        worker.work(warmUp, name + "-warm", false);
        out.println("ready");
        if (in.readLine() == null) {
          throw new IOException("nobody says that it begins");
        }
        Map<String, Object> outcome = worker.work(nanos, name, worker.task.get("trace").getAsBoolean());
        spent = worker.spent;
        outcome.put("spent", spent);
        out.println(GSON.toJson(outcome));
      } catch (Exception e) {
        out.println("failed: " + e.toString().replace('\n', ' '));
      }
    }
    Runtime.getRuntime().halt(0);
  }

  /** Does the task with objects of that name, for that time. */
  Map<String, Object> work(long nanos, String name, boolean trace) throws Exception {
    if (!does("repeat")) {
      throw new IllegalArgumentException(task.get("peer") + " does not " + task.get("do"));
    }
    return measure(nanos, name, trace);
  }

  boolean does(String job) {
    return task.get("do").getAsString().equals(job);
  }

  private long nanos(String name) {
    return task.get(name).getAsLong();
  }

  /** What one thread has done. */
  private final class Contender {
    final Operation operation;
    final int[] counts = new int[BUCKETS];
    final List<Long> got = new ArrayList<>();
    final List<Long> gave = new ArrayList<>();
    int done;
    int failed;
    String failure = "";
    volatile long started;
    volatile long ended;

    Contender(String name, int thread) throws Exception {
      boolean own = task.get("own").getAsBoolean();
      operation = operation(own ? name + "-" + ProcessHandle.current().pid() + "-" + thread : name);
    }

    void run(AtomicBoolean over, boolean trace) {
      long hold = nanos("hold");
      long rest = nanos("rest");
      while (!over.get() && failed < 3) {
        started = System.nanoTime();
        try {
          operation.acquire();
          if (trace) {
            got.add(System.nanoTime());
          }
          TimeUnit.NANOSECONDS.sleep(hold);
          if (trace) {
            gave.add(System.nanoTime());
          }
          operation.release();
          ended = System.nanoTime();
          counts[bucketOf(ended - started - hold)]++;
          done++;
          TimeUnit.NANOSECONDS.sleep(rest);
        } catch (Exception e) {
          failed++;
          failure = failure.isEmpty() ? e.toString() : failure;
        }
      }
    }
  }

  static int bucketOf(long nanos) {
    long v = Math.max(nanos, 0);
    int shift = Math.max(64 - Long.numberOfLeadingZeros(v) - SUB_BITS - 1, 0);
    return Math.min((shift << SUB_BITS) + (int) (v >> shift), BUCKETS - 1);
  }

  private Map<String, Object> measure(long nanos, String name, boolean trace) throws Exception {
    AtomicBoolean over = new AtomicBoolean();
    List<Contender> contenders = new ArrayList<>();
    List<Thread> threads = new ArrayList<>();
    CountDownLatch begin = new CountDownLatch(1);
    for (int i = 0; i < task.get("goroutines").getAsInt(); i++) {
      Contender contender = new Contender(name, i);
      contenders.add(contender);
      Thread thread =
          new Thread(
              () -> {
                try {
                  begin.await();
                } catch (InterruptedException e) {
                  return;
                }
                contender.run(over, trace);
              });
      thread.start();
      threads.add(thread);
    }
    long started = System.nanoTime();
    long used = PROCESS.getProcessCpuTime();
    begin.countDown();
    TimeUnit.NANOSECONDS.sleep(nanos);
    used = PROCESS.getProcessCpuTime() - used;
    over.set(true);
    long until = System.nanoTime() + PATIENCE;
    for (int i = 0; i < threads.size(); i++) {
      // A waiter cannot be called off without harm to others. One that is left behind has waited for so long at least.
      threads.get(i).join(Math.max(1, TimeUnit.NANOSECONDS.toMillis(until - System.nanoTime())));
      if (threads.get(i).isAlive()) {
        spent = true;
        contenders.get(i).counts[bucketOf(System.nanoTime() - contenders.get(i).started)]++;
      }
    }
    Map<String, Object> outcome = new HashMap<>();
    outcome.put("elapsed", Math.max(nanos, contenders.stream().mapToLong(c -> c.ended).max().orElse(0) - started));
    Map<Integer, Integer> latency = new HashMap<>();
    List<Integer> shares = new ArrayList<>();
    List<Long> got = new ArrayList<>();
    List<Long> gave = new ArrayList<>();
    int failed = 0;
    String failure = "";
    for (Contender c : contenders) {
      for (int i = 0; i < BUCKETS; i++) {
        if (c.counts[i] > 0) {
          latency.merge(i, c.counts[i], Integer::sum);
        }
      }
      shares.add(c.done);
      got.addAll(c.got);
      gave.addAll(c.gave);
      failed += c.failed;
      failure = failure.isEmpty() ? c.failure : failure;
    }
    outcome.put("latency", latency);
    outcome.put("cpu", used);
    outcome.put("shares", shares);
    outcome.put("got", got);
    outcome.put("gave", gave);
    outcome.put("failed", failed);
    outcome.put("failure", failure);
    return outcome;
  }
}
