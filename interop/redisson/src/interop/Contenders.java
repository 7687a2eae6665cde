package interop;

import com.google.gson.JsonArray;
import com.google.gson.JsonElement;
import com.google.gson.JsonObject;
import java.util.ArrayList;
import java.util.Collection;
import java.util.List;
import java.util.Map;
import java.util.Set;
import java.util.TreeSet;
import java.util.concurrent.ExecutorService;
import java.util.concurrent.Executors;
import java.util.concurrent.Future;
import java.util.concurrent.ThreadLocalRandom;
import org.redisson.api.RAtomicLong;
import org.redisson.api.RCountDownLatch;
import org.redisson.api.RLock;
import org.redisson.api.RPermitExpirableSemaphore;
import org.redisson.api.RSemaphore;
import org.redisson.api.RedissonClient;

/**
 * Many threads of one process that contend with each other and with those of other processes. What they do is told in
 * the test (contender_test.go), whose contenders do the same.
 *
 * <p>Every second one uses the asynchronous methods, under the id of its thread.
 */
final class Contenders {
  private final Map<String, RedissonClient> clients;
  private final RedissonClient client;
  private final String work;
  private final JsonArray objects;
  private final int contenders;
  private final int all; // of all processes
  private final long rounds; // of all contenders, but each of a latch's is one of every contender
  private final long limit; // of a semaphore

  private Contenders(Map<String, RedissonClient> clients, JsonObject command) {
    this.clients = clients;
    client = clients.get(command.get("client").getAsString());
    work = command.get("work").getAsString();
    objects = command.getAsJsonArray("objects");
    contenders = command.get("contenders").getAsInt();
    all = command.get("all").getAsInt();
    rounds = command.get("rounds").getAsLong();
    limit = command.get("limit").getAsLong();
  }

  /** What became of them: how many rounds each had, and the longest that one waited, in milliseconds. */
  private record Result(List<Integer> shares, long longest) {}

  private record Share(int rounds, long longest) {}

  static Object run(Map<String, RedissonClient> clients, JsonObject command) throws Exception {
    return new Contenders(clients, command).run();
  }

  private Result run() throws Exception {
    ExecutorService threads = Executors.newFixedThreadPool(contenders);
    try {
      List<Future<Share>> shares = new ArrayList<>();
      for (int i = 0; i < contenders; i++) {
        int number = i;
        shares.add(threads.submit(() -> contend(number)));
      }
      List<Integer> had = new ArrayList<>();
      long longest = 0;
      for (Future<Share> share : shares) {
        had.add(share.get().rounds);
        longest = Math.max(longest, share.get().longest);
      }
      return new Result(had, longest);
    } finally {
      threads.shutdownNow();
    }
  }

  private RAtomicLong number(String name) {
    return client.getAtomicLong(name);
  }

  private Share contend(int contender) throws Exception {
    List<Round> ways = ways(objects.get(contender % objects.size()).getAsJsonObject(), contender % 2 == 1);
    if (number("ready").incrementAndGet() > all) {
      throw new IllegalStateException("there are more contenders than that");
    }
    while (number("ready").get() < all) {
      Thread.sleep(1);
    }
    int had = 0;
    long longest = 0;
    while (work.equals("count") ? had < rounds : number("tickets").incrementAndGet() <= rounds) {
      Round round = ways.get(ThreadLocalRandom.current().nextInt(ways.size()));
      longest = Math.max(longest, round.go(had));
      had++;
    }
    return new Share(had, longest);
  }

  /** Something to be done over and over again. It returns for how many milliseconds it had to wait. */
  private interface Round {
    long go(int number) throws Exception;
  }

  private interface Action {
    void run() throws Exception;
  }

  /** What a contender can do in a round. */
  private List<Round> ways(JsonObject object, boolean async) throws Exception {
    return switch (work) {
      case "exclude" -> List.of(locked(object, async, () -> add(names(object))));
      case "share" -> {
        Round read = locked(kind("read", object), async, this::look);
        Round write =
            locked(
                kind("write", object),
                async,
                () -> {
                  add(List.of("a", "b"));
                  number("writes").incrementAndGet();
                });
        yield List.of(read, read, read, write);
      }
      case "limit" -> List.of(limited(Objects.find(clients, object), async));
      case "count" -> List.of(n -> count(object.get("name").getAsString() + n, async));
      default -> throw new IllegalArgumentException("what is " + work + "?");
    };
  }

  private static JsonObject kind(String kind, JsonObject object) {
    JsonObject other = object.deepCopy();
    other.addProperty("kind", kind);
    return other;
  }

  /** The names of the locks that are held by who holds the object. */
  private static Set<String> names(JsonObject object) {
    Set<String> names = new TreeSet<>();
    if (!object.has("members")) {
      names.add(object.get("name").getAsString());
      return names;
    }
    for (JsonElement member : object.getAsJsonArray("members")) {
      names.addAll(names(member.getAsJsonObject()));
    }
    return names;
  }

  private Round locked(JsonObject object, boolean async, Action fn) throws Exception {
    RLock lock = (RLock) Objects.find(clients, object);
    long thread = Thread.currentThread().getId();
    return n -> {
      long begin = System.nanoTime();
      if (async) {
        lock.lockAsync(thread).get();
      } else {
        lock.lock();
      }
      long waited = since(begin);
      try {
        fn.run();
      } finally {
        if (async) {
          lock.unlockAsync(thread).get();
        } else {
          lock.unlock();
        }
      }
      return waited;
    };
  }

  private static long since(long begin) {
    return (System.nanoTime() - begin) / 1_000_000;
  }

  /** Adds one to the numbers that belong to those names, which fails if anybody else does so meanwhile. */
  private void add(Collection<String> names) {
    for (String name : names) {
      RAtomicLong number = number("counter:" + name);
      number.set(number.get() + 1);
    }
  }

  /** Fails if one number has been written and the other has not. */
  private void look() {
    long a = number("counter:a").get();
    long b = number("counter:b").get();
    if (a != b) {
      throw new IllegalStateException("a reader saw " + a + " and " + b);
    }
  }

  private Round limited(Object semaphore, boolean async) {
    return n -> {
      long begin = System.nanoTime();
      Action release = acquire(semaphore, async);
      long waited = since(begin);
      try {
        long used = number("used").incrementAndGet();
        if (used > limit) {
          throw new IllegalStateException(used + " permits are in use, of " + limit);
        }
        number("used").decrementAndGet();
      } finally {
        release.run();
      }
      return waited;
    };
  }

  /** Takes a permit and returns how to give it back. */
  private static Action acquire(Object semaphore, boolean async) throws Exception {
    if (semaphore instanceof RSemaphore s) {
      if (async) {
        s.acquireAsync().get();
        return () -> s.releaseAsync().get();
      }
      s.acquire();
      return s::release;
    }
    RPermitExpirableSemaphore s = (RPermitExpirableSemaphore) semaphore;
    String permit = async ? s.acquireAsync().get() : s.acquire();
    return async ? () -> s.releaseAsync(permit).get() : () -> s.release(permit);
  }

  /**
   * Counts down and waits until all have. It does not wait asynchronously: awaitAsync misses a message that comes between
   * its look at the count and its listener, and hears of no other.
   */
  private long count(String name, boolean async) throws Exception {
    RCountDownLatch latch = client.getCountDownLatch(name);
    number("counted:" + name).incrementAndGet();
    long begin = System.nanoTime();
    if (async) {
      latch.countDownAsync().get();
    } else {
      latch.countDown();
    }
    latch.await();
    long waited = since(begin);
    long counted = number("counted:" + name).get();
    if (counted != all) {
      throw new IllegalStateException("the latch opened after " + counted + " of " + all);
    }
    return waited;
  }
}
